"""Lets a model call tools also where the request gives its answer a format.

vLLM 0.32 holds the whole output to the format, unless a tool is strict: then the output is calls or
an answer of that format, by its first token. Here it is so with all tools. Arguments stay free
unless their tool is strict. Parsers without a grammar of their calls get one that only holds how a
call begins.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from conserve.parsers import ARCHITECTURES, FORMATS, deepseek
from deployments.upstream.patch import Patch, of

# How calls begin that do not begin with a mark; {name} is the tool's. Empty: not known.
_BEGINNINGS: dict[str, tuple[str, ...]] = {
    "granite": ("<|tool_call|>", "<tool_call>"),
    "llama3_json": ('{"name": "{name}", "parameters": ',),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), ("[{name}(",)),
    "step3": (deepseek("tool_calls_begin"),),
    **dict.fromkeys(("gigachat3", "inkling", "kimi_k3", "muse_glimmer", "openai"), ()),
}


def apply() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.parser.abstract_parser import DelegatingParser as Parser
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers import structural_tag_registry as registry
    from xgrammar import structural_tag as xgrammar

    tag = Parser._apply_structural_tag

    def tagged(parser: Any, request: Any) -> Any:
        tool_parser, choice = parser.tool_parser, request.tool_choice or "auto"
        tools = registry.get_function_tools(request.tools or ())
        wanted = request.extract_structured_outputs() if tools and choice == "auto" else None
        # The client's own tags are for calls, too.
        if wanted is None or wanted.structural_tag:
            return tag(parser, request)
        request.tool_choice = choice
        parser.tool_strict_level = parser.tool_strict_level or registry.ToolStrictLevel.FUNCTION
        if tool_parser.structural_tag_model is None:
            kinds = ToolParserManager.tool_parsers.items()
            name = next((name for name, kind in kinds if type(tool_parser) is kind), "")
            names = [getattr(tool, "function", tool).name for tool in tools]
            texts: list[Any] = [
                xgrammar.ConstStringFormat(value=one) for one in call_beginnings(name, names)
            ]
            if texts:
                call: list[Any] = [xgrammar.OrFormat(elements=texts), xgrammar.AnyTextFormat()]
                calls = xgrammar.StructuralTag(format=xgrammar.SequenceFormat(elements=call))
                tool_parser.structural_tag_model = "hermes"  # Any one: its tag is not asked for.
                tool_parser.get_structural_tag = lambda *_, **__: calls
        outputs = tag(parser, request).structured_outputs
        if outputs is None or not outputs.structural_tag:
            raise VLLMValidationError(
                "this model's answers cannot be held to this format (response_format, text.format "
                "or output_config.format) where it may call tools; send either tools or a format"
            )
        return request

    Parser._apply_structural_tag = tagged


def call_beginnings(parser: str, tools: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of which one begins an output that calls tools; empty if not known."""
    formats = (*FORMATS, *chain.from_iterable(ARCHITECTURES.values()))
    marks = [one.marks[0] for one in formats if one.tool == parser and one.marks]
    found = _BEGINNINGS.get(parser, marks)
    return tuple({text.replace("{name}", name): None for text in found for name in tools})


PATCH = Patch(
    name="uncallable_tools",
    package="vllm",
    seams=(
        "vllm.parser.abstract_parser:DelegatingParser._apply_structural_tag",
        "vllm.tool_parsers:ToolParserManager.tool_parsers",
        "vllm.tool_parsers.abstract_tool_parser:ToolParser.get_structural_tag",
        *of("vllm.tool_parsers.structural_tag_registry", "get_function_tools ToolStrictLevel"),
    ),
    why="a model cannot call tools where the request gives its answer a format",
    upstream="vllm-project/vllm#39929 and #16313",
    process="server",
    apply=apply,
)
