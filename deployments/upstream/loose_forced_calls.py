"""Has the arguments of a forced tool call fit the tool's schema.

In vLLM 0.32 a tool without ``strict`` counts as not strict, also where the request forces a call
(``tool_choice`` names a function, or is ``required``). Then any JSON is taken for its arguments,
even a number or a string, which the Messages API answers with an error. So it is for tools without
parameters, which OpenAI calls with ``{}``. A tool with ``strict: false`` may have any object.
"""

import functools
from typing import Any

from deployments.upstream.patch import Patch


def apply() -> None:
    from vllm.parser import abstract_parser, harmony
    from vllm.tool_parsers import structural_tag_registry as registry
    from xgrammar import builtin_structural_tag as builtin

    resolve = registry.resolve_tool_strictness

    @functools.wraps(resolve)
    def resolved(tools: Any, tool_choice: Any, strict_level: Any) -> Any:
        if tool_choice != "auto":
            tools = [
                registry._with_tool_strict(tool, True) if _is_unset(tool) else tool
                for tool in tools
            ]
        return resolve(tools, tool_choice, strict_level)

    def parameters(function: Any) -> Any:
        if getattr(function, "strict", None) is False:
            return {"type": "object"}
        return function.parameters or {"type": "object", "properties": {}}

    registry.resolve_tool_strictness = abstract_parser.resolve_tool_strictness = resolved
    registry.get_function_parameters = harmony.get_function_parameters = parameters
    builtin._get_function_parameters = parameters


def _is_unset(tool: Any) -> bool:
    return getattr(getattr(tool, "function", tool), "strict", False) is None


PATCH = Patch(
    name="loose_forced_calls",
    seams=(
        "vllm.tool_parsers.structural_tag_registry:resolve_tool_strictness",
        "vllm.tool_parsers.structural_tag_registry:_with_tool_strict",
        "vllm.parser.abstract_parser:resolve_tool_strictness",
        "vllm.tool_parsers.structural_tag_registry:get_function_parameters",
        "vllm.parser.harmony:get_function_parameters",
        "xgrammar.builtin_structural_tag:_get_function_parameters",
    ),
    why="a forced call's arguments may be any JSON, and no object that fits the tool's schema",
    upstream="not reported: PR 56268 made absent `strict` mean false for forced calls, too",
    process="server",
)
