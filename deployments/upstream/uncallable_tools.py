"""Has a model call tools also where the request gives its answer a format.

vLLM 0.32 holds the whole output to the format, unless a tool is strict. Here a model first runs
without it, for a few tokens that no client sees. If it begins a call, its output begins so, too.
Otherwise the output is held to the format, and nothing in it is taken for a call. A model that
reasons decides meanwhile: what comes behind that is calls or an answer, by its first characters.
"""

import copy
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any

from conserve.parsers import ARCHITECTURES, FORMATS, deepseek
from conserve.wire import STATS
from deployments.upstream.patch import Patch, of

# Models say less before a call.
LOOK_AHEAD_TOKENS = 64
# How calls begin that do not begin with a mark; {name} is the tool's. Empty: not known.
_BEGINNINGS: dict[str, tuple[str, ...]] = {
    "granite": ("<|tool_call|>", "<tool_call>"),
    "llama3_json": ('{"name": "{name}"', '{"name":"{name}"', "<|python_tag|>"),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), ("[{name}(",)),
    "step3": (deepseek("tool_calls_begin"),),
    **dict.fromkeys(("gigachat3", "inkling", "kimi_k3", "muse_glimmer", "openai"), ()),
}


def apply() -> None:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser.abstract_parser import DelegatingParser as Parser
    from vllm.v1.engine.async_llm import AsyncLLM

    tag, whole = Parser._apply_structural_tag, Parser._extract_tool_calls
    streamed = Parser._extract_tool_calls_streaming

    def extracted(parser: Any, content: Any, request: Any, *given: Any, **more: Any) -> Any:
        if _is_answer(request, content or ""):
            return None, content
        return whole(parser, content, request, *given, **more)

    def extracted_streaming(parser: Any, *given: Any, **named: Any) -> Any:
        _, _, text, *_, request = given or (0, 0, named["delta_text"], named["request"])
        if not hasattr(parser, "finds_answer") and text.strip():
            parser.finds_answer = _is_answer(request, text)
        if getattr(parser, "finds_answer", False):
            return DeltaMessage(content=text), False
        return streamed(parser, *given, **named)

    Parser._apply_structural_tag = lambda parser, request: _tagged(tag, parser, request)
    Parser._extract_tool_calls = extracted
    Parser._extract_tool_calls_streaming = extracted_streaming
    AsyncLLM.generate = choosing(AsyncLLM.generate)


def _is_answer(request: Any, text: str) -> bool:
    """Return whether an output that begins with ``text`` is an answer in the request's format."""
    answers = getattr(request.structured_outputs, "answers", False)
    return text.lstrip()[:1] not in answers if isinstance(answers, str) else answers


def _tagged(tag: Callable[..., Any], parser: Any, request: Any) -> Any:
    """Return a request by whose format tools can be called."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers import structural_tag_registry as registry
    from xgrammar import structural_tag as xgrammar

    tool_parser, choice = parser.tool_parser, request.tool_choice or "auto"
    tools = registry.get_function_tools(request.tools or ())
    wanted = request.extract_structured_outputs() if tools and choice != "none" else None
    model, responds = tool_parser.structural_tag_model, isinstance(request, ResponsesRequest)
    if (
        wanted is None
        # The client's own tags are for calls, too. (gpt-oss has all answers in tags.)
        or (wanted.structural_tag and model != "harmony")
        # Mistral's tokenizers have a grammar of both.
        or (not responds and getattr(parser.model_tokenizer, "supports_grammar", False))
        # vLLM drops the format of a forced call.
        or (choice != "auto" and (model or tool_parser.supports_required_and_named))
    ):
        return tag(parser, request)
    request.tool_choice = choice
    known = ToolParserManager.tool_parsers.items()
    name = next((name for name, kind in known if type(tool_parser) is kind), "")
    beginnings = call_beginnings(name, [getattr(tool, "function", tool).name for tool in tools])
    texts: list[Any] = [xgrammar.ConstStringFormat(value=text) for text in beginnings]
    free: list[Any] = [xgrammar.OrFormat(elements=texts), xgrammar.AnyTextFormat()]
    free_tag = xgrammar.StructuralTag(format=xgrammar.SequenceFormat(elements=free))
    strict = model is not None and registry._any_tool_strict(tools)
    if beginnings and choice == "auto" and parser.reasoning_parser is None:
        calls = tool_parser.get_structural_tag(request) if strict else None
        if calls is not None:
            calls.format.at_least_one = True
        held = json.dumps((calls or free_tag).model_dump())
        request.structured_outputs = outputs = copy.copy(wanted)
        outputs.beginnings, outputs.calls = beginnings, type(wanted)(structural_tag=held)
        setattr(request, "text" if responds else "response_format", None)
        return request
    if beginnings and not strict:
        tool_parser.structural_tag_model = model = "free"
        tool_parser.get_structural_tag = lambda *_, **__: free_tag
    parser.tool_strict_level = parser.tool_strict_level or registry.ToolStrictLevel.FUNCTION
    outputs = tag(parser, request).structured_outputs
    alike = choice == "auto" and any(one.startswith("{") for one in beginnings)
    if outputs is None or not outputs.structural_tag or alike:
        raise VLLMValidationError(
            "this model's answers cannot be held to "
            f"{'this' if model else 'a'} format (response_format, text.format or "
            "output_config.format) where it may call tools; send either tools or a format",
            parameter="text.format" if responds else "response_format",
        )
    if choice == "auto" and beginnings:
        outputs.answers = "".join(one[0] for one in beginnings)
    return request


def choosing(generate: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    """Return ``AsyncLLM.generate`` that looks ahead for a call."""
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    @functools.wraps(generate)
    async def generated(
        client: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        params, first = sampling_params, None
        wanted = params.structured_outputs
        if beginnings := getattr(wanted, "beginnings", ()):
            ahead = copy.copy(params)
            ahead.structured_outputs = ahead.logprobs = ahead.prompt_logprobs = None
            ahead.n = ahead.min_tokens = 1
            ahead.max_tokens = min(LOOK_AHEAD_TOKENS, params.max_tokens or LOOK_AHEAD_TOKENS)
            ahead.stop = [*(params.stop or ()), *beginnings]
            ahead.include_stop_str_in_output = False
            ahead.output_kind = RequestOutputKind.FINAL_ONLY
            async for first in generate(client, prompt, ahead, request_id, **options):
                said = first.outputs[0]
            wanted.answers = said.stop_reason not in beginnings
            if not wanted.answers:
                before = [{"type": "const_string", "value": said.text}] if said.text else []
                calls = json.loads(wanted.calls.structural_tag)["format"]
                held = {"type": "sequence", "elements": [*before, calls]}
                tag = json.dumps({"type": "structural_tag", "format": held})
                params = copy.copy(params)
                params.structured_outputs = StructuredOutputsParams(structural_tag=tag)
        async with aclosing(generate(client, prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                if first is not None:
                    # The look ahead has put the rest of the prompt into the cache.
                    output.num_cached_tokens = first.num_cached_tokens
                    if STATS in (told := output.kv_transfer_params or {}):
                        told[STATS] = (first.kv_transfer_params or {}).get(STATS)
                yield output

    return generated


def call_beginnings(parser: str, tools: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of which one begins an output that calls tools; empty if not known."""
    formats = (*FORMATS, *chain.from_iterable(ARCHITECTURES.values()))
    marks = [one.marks[0] for one in formats if one.tool == parser and one.marks]
    found = _BEGINNINGS.get(parser, marks)
    return tuple({text.replace("{name}", name): None for text in found for name in tools})


_PARSER = "vllm.parser.abstract_parser:DelegatingParser"

PATCH = Patch(
    name="uncallable_tools",
    package="vllm",
    seams=(
        *of(_PARSER, "_apply_structural_tag _extract_tool_calls _extract_tool_calls_streaming"),
        *of("vllm.tool_parsers:ToolParserManager", "tool_parsers"),
        *of("vllm.tool_parsers.abstract_tool_parser:ToolParser", "get_structural_tag"),
        *of("vllm.tool_parsers.structural_tag_registry", "get_function_tools _any_tool_strict"),
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
    ),
    why="a model cannot call tools where the request gives its answer a format",
    upstream="vllm-project/vllm#39929 and #16313",
    process="server",
    apply=apply,
)
