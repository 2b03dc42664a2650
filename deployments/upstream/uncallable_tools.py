"""Looks ahead for a tool call where the request also gives its answer a format.

vLLM 0.32 holds the whole output to the format, unless a tool is strict. With this patch, the model
first runs without the format, for a few tokens that no client sees. If it begins a call there, its
output begins in the same way. Otherwise the output is held to the format, and has no calls. After
reasoning there is no look-ahead: the first character decides.
"""

import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import chain
from typing import Any

from conserve.parsers import ARCHITECTURES, FORMATS, deepseek
from conserve.wire import STATS
from deployments.upstream.patch import Patch, of

_LOOK_AHEAD_TOKENS = 64  # Models say less before a call.
# By parser, how calls begin; {name} is the tool's. Empty: not known.
_BEGINNINGS: dict[str | None, tuple[str, ...]] = {
    **{one.tool: one.marks[:1] for one in (*FORMATS, *chain(*ARCHITECTURES.values()))},
    "granite": ("<|tool_call|>", "<tool_call>"),
    "llama3_json": ('{"name": "{name}"', '{"name":"{name}"', "<|python_tag|>"),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), ("[{name}(",)),
    "step3": (deepseek("tool_calls_begin"),),
    **dict.fromkeys(("gigachat3", "kimi_k3", "muse_glimmer", "openai"), ()),
}


def apply() -> None:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser.abstract_parser import DelegatingParser as Parser
    from vllm.v1.engine.async_llm import AsyncLLM

    tag, generate = Parser._apply_structural_tag, AsyncLLM.generate
    whole, streamed = Parser.extract_tool_calls, Parser.extract_tool_calls_streaming

    def extracted(parser: Any, text: str, request: Any) -> Any:
        _judge(parser, request, text)
        return whole(parser, text, request)

    def extracted_streaming(parser: Any, *given: Any) -> Any:
        _judge(parser, given[-1], given[2])
        return streamed(parser, *given) if parser.tool_parser else DeltaMessage(content=given[2])

    Parser.extract_tool_calls, Parser.extract_tool_calls_streaming = extracted, extracted_streaming
    Parser._apply_structural_tag = lambda *given: _tagged(tag, *given)
    AsyncLLM.generate = lambda *given, **options: _generated(generate, *given, **options)


def _judge(parser: Any, request: Any, text: str) -> None:
    """Stop a parser from looking for calls in an answer."""
    firsts, first = getattr(request.structured_outputs, "firsts", None), text.lstrip()[:1]
    if firsts is not None and first and vars(parser).setdefault("first", first) not in firsts:
        parser._tool_parser = None


def _tagged(tag: Callable[..., Any], parser: Any, request: Any) -> Any:
    """Return a request whose format allows tool calls."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.exceptions import VLLMValidationError
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers.structural_tag_registry import ToolStrictLevel, get_function_tools
    from xgrammar import structural_tag as xgrammar

    tool_parser, choice = parser.tool_parser, request.tool_choice or "auto"
    model, responds = tool_parser.structural_tag_model, isinstance(request, ResponsesRequest)
    functions = [t if responds else t.function for t in get_function_tools(request.tools or ())]
    wanted = request.extract_structured_outputs() if functions and choice != "none" else None
    # A client's own tags are for calls, too. (gpt-oss has all answers in tags.) Mistral's
    # tokenizers have a grammar of both. vLLM drops the format of a forced call.
    is_tagged = wanted is not None and wanted.structural_tag and model != "harmony"
    is_both = not responds and getattr(parser.model_tokenizer, "supports_grammar", False)
    is_forced = choice != "auto" and (model or tool_parser.supports_required_and_named)
    if wanted is None or is_tagged or is_both or is_forced:
        return tag(parser, request)
    parsers = {kind: name for name, kind in ToolParserManager.tool_parsers.items()}
    texts = _BEGINNINGS.get(parsers.get(type(tool_parser), ""), ())
    beginnings = {text.replace("{name}", one.name) for text in texts for one in functions}
    looks_ahead = beginnings and choice == "auto" and parser.reasoning_parser is None
    request.tool_choice, request.structured_outputs = choice, None if looks_ahead else wanted
    setattr(request, "text" if responds else "response_format", None)
    if beginnings and not (model and any(one.strict for one in functions)):
        begun: list[Any] = [xgrammar.ConstStringFormat(value=text) for text in beginnings]
        call: list[Any] = [xgrammar.OrFormat(elements=begun), xgrammar.AnyTextFormat()]
        calls = xgrammar.StructuralTag(format=xgrammar.SequenceFormat(elements=call))
        tool_parser.structural_tag_model = "free"
        tool_parser.get_structural_tag = lambda *_, **__: calls
    parser.tool_strict_level = parser.tool_strict_level or ToolStrictLevel.FUNCTION
    outputs = tag(parser, request).structured_outputs
    firsts = {text[0] for text in beginnings if choice == "auto" and not looks_ahead}
    if outputs is None or not outputs.structural_tag or "{" in firsts:
        raise VLLMValidationError(
            "this model cannot be held to this format beside tools; send either tools or a format",
            parameter="text.format" if responds else "response_format",
        )
    outputs.firsts = firsts or None
    if looks_ahead:
        request.structured_outputs, wanted.beginnings, wanted.calls = wanted, beginnings, outputs
    return request


async def _generated(
    generate: Callable[..., Any], client: Any, prompt: Any, params: Any, *given: Any, **options: Any
) -> AsyncIterator[Any]:
    """Yield the outputs of ``AsyncLLM.generate``, after a look-ahead for a call."""
    wanted, first = params.structured_outputs, None
    if beginnings := getattr(wanted, "beginnings", ()):
        ahead, params = copy.copy(params), copy.copy(params)
        ahead.structured_outputs = ahead.logprobs = ahead.prompt_logprobs = None
        ahead.n, ahead.min_tokens, ahead.include_stop_str_in_output = 1, 0, False
        ahead.max_tokens = min(_LOOK_AHEAD_TOKENS, params.max_tokens or _LOOK_AHEAD_TOKENS)
        ahead.stop = [*params.stop, *beginnings]
        ahead.output_kind = type(ahead.output_kind).FINAL_ONLY
        async for first in generate(client, prompt, ahead, *given, **options):
            said = first.outputs[0]
        if said.stop_reason in beginnings:
            tag = json.loads(wanted.calls.structural_tag)
            text, calls = {"type": "const_string", "value": said.text}, tag["format"]
            tag["format"] = {"type": "sequence", "elements": [text, calls | {"at_least_one": True}]}
            params.structured_outputs = type(wanted)(structural_tag=json.dumps(tag))
        else:
            wanted.firsts = ""
    async with aclosing(generate(client, prompt, params, *given, **options)) as outputs:
        async for output in outputs:
            if first is not None:
                # The look-ahead has put the rest of the prompt into the cache.
                output.num_cached_tokens = first.num_cached_tokens
                if STATS in (told := output.kv_transfer_params or {}):
                    told[STATS] = (first.kv_transfer_params or {}).get(STATS)
            yield output


_PARSER = "vllm.parser.abstract_parser:DelegatingParser"
PATCH = Patch(
    name="uncallable_tools",
    seams=(
        *of(_PARSER, "_apply_structural_tag extract_tool_calls extract_tool_calls_streaming"),
        "vllm.tool_parsers:ToolParserManager.tool_parsers",
        "vllm.tool_parsers.structural_tag_registry:get_function_tools",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
    ),
    why="a model cannot call tools where the request gives its answer a format",
    upstream="vllm-project/vllm#39929 and #16313",
    process="server",
)
