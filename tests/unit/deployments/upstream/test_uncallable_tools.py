"""Requests with tools and a format of the answer, in vLLM's own parsers and grammars.

The model is a stand-in: of a few texts it says the first one that the request's grammar takes.
"""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer
from vllm import CompletionOutput, RequestOutput
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager

from conserve.embedded import model_path
from conserve.parsers import TOOL_TOKENS, deepseek
from deployments.upstream import loose_forced_calls
from deployments.upstream.uncallable_tools import PATCH, choosing
from tests.unit.deployments.upstream.originals import unpatched

restored = unpatched(PATCH, loose_forced_calls.PATCH)

PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
FUNCTION = {"name": "look_up", "parameters": PARAMETERS}
SCHEMA = {
    "type": "object",
    "properties": {"said": {"type": "string"}},
    "required": ["said"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"on": true}}\n</tool_call>'
PROSE = "It is on, as far as I can see."
ANSWER = '{"said":"It is on."}'
QUOTE = json.dumps({"said": f"It wrote {CALL} </think>"})
CALLED = ("look_up", {"on": True})


def wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}


@pytest.fixture
def patched() -> None:
    for patch in (loose_forced_calls.PATCH, PATCH):
        assert patch.apply is not None
        patch.apply()


@functools.cache
def compiler(tokenizer: Any) -> tuple[xgrammar.GrammarCompiler, int]:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    return xgrammar.GrammarCompiler(info, max_threads=1), info.stop_token_ids[0]


def accepts(tokenizer: Any, outputs: Any, text: str) -> bool:
    """Whether the grammar of vLLM's parameters takes a text as the whole output."""
    grammars, stop_id = compiler(tokenizer)
    if outputs.structural_tag:
        grammar = grammars.compile_structural_tag(outputs.structural_tag)
    else:
        grammar = grammars.compile_json_schema(json.dumps(outputs.json or {"type": "object"}))
    matcher = xgrammar.GrammarMatcher(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.accept_token, [*ids, stop_id]))


class Model:
    """Says of `texts` the first that it may."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts, self.runs = tokenizer, texts, 0

    @choosing
    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.runs += 1
        held = params.structured_outputs
        text = next(t for t in self.texts if held is None or accepts(self.tokenizer, held, t))
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: params.max_tokens]
        text = self.tokenizer.decode(ids)
        found = {at: stop for stop in params.stop or () if (at := text.find(stop)) >= 0}
        stop = found[min(found)] if found else None
        text = text[: min(found)] if found else text
        choice = CompletionOutput(0, text, ids, None, None, finish_reason="stop", stop_reason=stop)
        yield RequestOutput(
            request_id, None, [1], None, [choice], True, num_cached_tokens=self.runs
        )


DEEPSEEK = [deepseek(f"tool▁{name}") for name in ("call▁begin", "sep", "call▁end")]
MORE = ("<think>", "</think>", *DEEPSEEK)
# How models write the call.
WRITTEN = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=on>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm47": "<tool_call>look_up<arg_key>on</arg_key><arg_value>true</arg_value></tool_call>",
    "llama3_json": '{"name": "look_up", "parameters": {"on": true}}',
    "deepseek_v31": f"{deepseek('tool▁calls▁begin')}{DEEPSEEK[0]}look_up{DEEPSEEK[1]}"
    f'{{"on": true}}{DEEPSEEK[2]}{deepseek("tool▁calls▁end")}',
    "granite4": '<tool_call>{"name": "look_up", "arguments": {"on": true}}</tool_call>',
    "pythonic": "[look_up(on=True)]",
    "mistral": '[TOOL_CALLS][{"name": "look_up", "arguments": {"on": true}}]',
}
THOUGHT = "<think>\nIs it on?\n</think>"


def say(name: str, thought: str, *texts: str, strict: Any = None, **asked: Any) -> Any:
    """How parsers are made, a request as they adjust it, and what a model puts out."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
    tokenizer.add_tokens([*TOOL_TOKENS.get(name, ()), *MORE], special_tokens=True)
    kind: Any = ParserManager.get_parser(name, "qwen3" if thought else None, True, "m")
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": {**FUNCTION, "strict": strict}}],
        **{"response_format": wanted(SCHEMA), **asked},
    )  # fmt: skip
    about = {"model_config": None, "chat_template_kwargs": {}}
    parser = functools.partial(kind, tokenizer, request.tools, **about)
    parser().adjust_request(request)
    stream = Model(tokenizer, texts).generate(
        {"prompt_token_ids": [1]}, request.to_sampling_params(500, {}), "r"
    )
    (output,) = asyncio.run(_all(stream))
    return parser, request, output


async def _all(stream: AsyncIterator[Any]) -> list[Any]:
    return [output async for output in stream]


def run(name: str, thought: str, *texts: str, **asked: Any) -> list[Any]:
    """What a parser finds in a model's output, in one piece and in a stream."""
    parser, request, output = say(name, thought, *texts, **asked)
    tokenizer = parser.args[0]
    text = thought + output.outputs[0].text
    ids = tokenizer.encode(text, add_special_tokens=False)
    _, content, whole = parser().parse(
        text, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    reads, told, pieces, found = parser(), "", [], []
    for at, token in enumerate(ids, 1):
        decoded = tokenizer.decode(ids[:at])
        delta = reads.parse_delta(
            decoded[len(told) :], [token], request, [1], finished=at == len(ids)
        )
        told = decoded
        pieces.append((delta and delta.content) or "")
        for call in delta.tool_calls if delta else ():
            found += [["", ""]] if call.id else []
            found[-1][0] += call.function.name or ""
            found[-1][1] += call.function.arguments or ""
    calls = [[call.name, call.arguments] for call in whole or ()]
    return [
        ((text or "").strip(), [(name, json.loads(given)) for name, given in these])
        for text, these in ((content, calls), ("".join(pieces), found))
    ]


NAMED = {"type": "function", "function": {"name": "look_up"}}
# What the model would like to say, what the request asks for beside a format, and what comes.
SAID: dict[str, tuple[tuple[str, ...], dict[str, Any], str, list[Any]]] = {
    "a call": ((CALL,), {}, "", [CALLED]),
    "a call, chosen by null": ((CALL,), {"tool_choice": None}, "", [CALLED]),
    "text and a call": ((f"I look.\n{CALL}", ANSWER), {}, "I look.", [CALLED]),
    "two calls": ((f"{CALL}\n{CALL}",), {}, "", [CALLED, CALLED]),
    "a call of a strict tool": ((f"I look.\n{CALL}",), {"strict": True}, "I look.", [CALLED]),
    "an answer": ((PROSE, ANSWER), {}, ANSWER, []),
    "an object": ((PROSE, "{}"), {"response_format": {"type": "json_object"}}, "{}", []),
    "text that is no call's": ((f"{PROSE * 9}\n{CALL}", ANSWER), {}, ANSWER, []),
    "an answer that quotes a call": ((PROSE, QUOTE), {}, QUOTE, []),
    "a forced call": ((ANSWER, PROSE, CALL), {"tool_choice": "required"}, "", [CALLED]),
    "a named call": ((ANSWER, PROSE, CALL), {"tool_choice": NAMED}, "", [CALLED]),
}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("said", SAID)
def test_a_model_calls_or_answers_in_the_format(said: str) -> None:
    texts, asked, text, calls = SAID[said]
    assert run("hermes", "", *texts, **asked) == [(text, calls)] * 2


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["", "behind reasoning"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_and_answers_of_each_family(name: str, thought: str) -> None:
    if (name, thought) in REFUSED:
        return
    call = WRITTEN[name]
    answer = json.dumps({"said": f"It wrote {call}"})
    assert run(name, thought, call) == [("", [CALLED])] * 2
    assert run(name, thought, PROSE, answer) == [(answer, [])] * 2


UNHELD = {"type": "object", "properties": {"said": {"type": "number", "multipleOf": 3}}}
# With reasoning, Llama's calls begin as an answer may; other parsers' beginnings are not known.
REFUSED: dict[tuple[str, str], dict[str, Any]] = {
    ("gigachat3", ""): SCHEMA,
    ("llama3_json", THOUGHT): SCHEMA,
    ("hermes", THOUGHT): UNHELD,
}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("name", "thought"), REFUSED)
def test_what_would_never_call_is_refused(name: str, thought: str) -> None:
    form = {"response_format": wanted(REFUSED[name, thought])}
    with pytest.raises(VLLMValidationError, match="send either tools or a format") as refused:
        run(name, thought, CALL, **form)
    assert refused.value.parameter == "response_format"
    # Without tools being allowed, the format is served.
    assert run(name, thought, ANSWER, '{"said":3}', tool_choice="none", **form)


def test_vllm_takes_no_call_where_an_answer_has_a_format() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        run("hermes", "", CALL)
    with pytest.raises(RuntimeError, match="StopIteration"):
        run("hermes", THOUGHT, CALL)


@pytest.mark.usefixtures("patched")
def test_a_parser_that_passes_its_arguments_by_position_streams_on() -> None:
    assert run("kimi_k3", "", PROSE, response_format=None) == [(PROSE, [])] * 2


@pytest.mark.usefixtures("patched")
def test_what_the_look_ahead_has_cached_does_not_count() -> None:
    assert say("hermes", "", CALL)[2].num_cached_tokens == 1
