"""Requests with tools and a format of the answer, in vLLM's own server, parsers and grammars.

The model is a stand-in: of a few texts it says the first one that the request's grammar takes.
"""

import asyncio
import functools
import itertools
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

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.embedded import model_path
from conserve.parsers import TOOL_TOKENS, deepseek
from deployments.upstream import loose_forced_calls
from deployments.upstream.uncallable_tools import PATCH, choosing
from tests import calling
from tests.unit.deployments.engine.test_refusals import Client, post, serve
from tests.unit.deployments.upstream.originals import unpatched

restored = unpatched(PATCH, loose_forced_calls.PATCH)

Json = dict[str, Any]
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


class Model(Client):
    """Says of `texts` the first that it may; ``ran`` has its runs' parameters."""

    texts: Sequence[str] = ()

    def __init__(self, tokenizer: Any = None) -> None:
        self.ran: list[Any] = []
        if tokenizer is None:
            super().__init__()
            tokenizer = self.renderer.tokenizer
        self.tokenizer = tokenizer

    @choosing
    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.ran.append(params)
        held = params.structured_outputs
        text = next(t for t in self.texts if held is None or accepts(self.tokenizer, held, t))
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: params.max_tokens]
        text = self.tokenizer.decode(ids)
        found = {at: stop for stop in params.stop or () if (at := text.find(stop)) >= 0}
        stop = found[min(found)] if found else None
        if found:
            ids = self.tokenizer.encode(text[: min(found)], add_special_tokens=False)
        step = 3 if params.output_kind.name == "DELTA" else max(1, len(ids))
        told = ""
        for end in range(step, max(len(ids), 1) + step, step):
            whole, last = self.tokenizer.decode(ids[:end]), end >= len(ids)
            choice = CompletionOutput(0, whole[len(told) :], ids[end - step : end], None, None)
            choice.finish_reason, choice.stop_reason = ("stop", stop) if last else (None, None)
            yield RequestOutput(
                request_id, None, [1], None, [choice], last, num_cached_tokens=len(self.ran)
            )
            told = whole


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def server(model: Model) -> Any:
    return serve(model)


WANTED = {
    "chat": (CHAT, calling.wanted(CHAT, SCHEMA)),
    "chat, any object": (CHAT, {"response_format": {"type": "json_object"}}),
    "chat, vLLM's own": (CHAT, {"structured_outputs": {"json": SCHEMA}}),
    "response": (RESPONSES, calling.wanted(RESPONSES, SCHEMA)),
    "message": (MESSAGES, calling.wanted(MESSAGES, SCHEMA)),
}
# What the model would like to say, what the request asks for beside a format, and what comes.
SAID: dict[str, tuple[tuple[str, ...], Json, str, list[Any]]] = {
    "a call": ((CALL,), {}, "", [CALLED]),
    "a call, chosen by null": ((CALL,), {"choice": None}, "", [CALLED]),
    "text and a call": ((f"I look.\n{CALL}", ANSWER), {}, "I look.", [CALLED]),
    "two calls": ((f"{CALL}\n{CALL}",), {}, "", [CALLED, CALLED]),
    "one call only": ((f"{CALL}\n{CALL}",), {"single": True}, "", [CALLED]),
    "a call of a strict tool": ((f"I look.\n{CALL}",), {}, "I look.", [CALLED]),
    "an answer": ((PROSE, ANSWER), {}, ANSWER, []),
    "text that is no call's": ((f"{PROSE * 9}\n{CALL}", ANSWER), {}, ANSWER, []),
    "an answer that quotes a call": ((PROSE, QUOTE), {}, QUOTE, []),
    "an answer, as no call may be": ((CALL, ANSWER), {"choice": "none"}, ANSWER, []),
    "a forced call": ((ANSWER, PROSE, CALL), {"choice": "required"}, "", [CALLED]),
    "a named call": ((ANSWER, PROSE, CALL), {"choice": "look_up"}, "", [CALLED]),
}


# vLLM refuses these.
_REFUSED = ("response", "chosen by null"), ("vLLM's own", "chosen by null"), ("vLLM's own", "named")
CASES = [
    (said, wanted)
    for said, wanted in itertools.product(SAID, WANTED)
    if not any(one in wanted and other in said for one, other in _REFUSED)
]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("said", "wanted"), CASES)
def test_a_model_calls_or_answers_in_the_format(
    model: Model, server: Any, said: str, wanted: str, stream: bool
) -> None:
    path, more = WANTED[wanted]
    model.texts, asked, text, calls = SAID[said]
    function = {**FUNCTION, "strict": True} if "strict" in said else FUNCTION
    body = calling.request(path, "Is it on?", [function], **asked)
    reply = post(server, path, {**body, **more, "stream": stream})
    assert reply.status_code == 200, reply.text
    assert calling.read(path, reply) == (text, calls)


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


def say(name: str, thought: str, *texts: str, **asked: Any) -> tuple[Any, Any, list[Any]]:
    """How parsers are made, a request as they adjust it, and what a model puts out."""
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
    tokenizer.add_tokens([*TOOL_TOKENS.get(name, ()), *MORE], special_tokens=True)
    kind: Any = ParserManager.get_parser(name, "qwen3" if thought else None, True, "m")
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": FUNCTION}],
        **{**WANTED["chat"][1], **asked},
    )  # fmt: skip
    about = {"model_config": None, "chat_template_kwargs": {}}
    parser = functools.partial(kind, tokenizer, request.tools, **about)
    parser().adjust_request(request)
    model = Model(tokenizer)
    model.texts = texts

    async def said() -> list[Any]:
        params = request.to_sampling_params(500, {})
        stream = model.generate({"prompt_token_ids": [1]}, params, "r")
        return [output async for output in stream]

    return parser, request, asyncio.run(said())


def run(name: str, thought: str, *texts: str, **asked: Any) -> list[Any]:
    """What a parser finds in a model's output, in one piece and in a stream."""
    parser, request, outputs = say(name, thought, *texts, **asked)
    tokenizer = parser.args[0]
    text = thought + "".join(output.outputs[0].text for output in outputs)
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
REFUSED: dict[tuple[str, str], Json] = {
    ("gigachat3", ""): SCHEMA,
    ("llama3_json", THOUGHT): SCHEMA,
    ("hermes", THOUGHT): UNHELD,
}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("name", "thought"), REFUSED)
def test_what_would_never_call_is_refused(name: str, thought: str) -> None:
    schema = {"name": "r", "schema": REFUSED[name, thought]}
    wanted = {"response_format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(VLLMValidationError, match="send either tools or a format") as refused:
        run(name, thought, CALL, **wanted)
    assert refused.value.parameter == "response_format"
    # Without tools being allowed, the format is served.
    assert run(name, thought, ANSWER, '{"said":3}', tool_choice="none", **wanted)


def test_vllm_takes_no_call_where_an_answer_has_a_format() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        run("hermes", "", CALL)
    with pytest.raises(RuntimeError, match="StopIteration"):
        run("hermes", THOUGHT, CALL)


@pytest.mark.usefixtures("patched")
def test_what_the_look_ahead_has_cached_does_not_count() -> None:
    _, _, outputs = say("hermes", "", CALL, stream=True)
    assert len(outputs) > 1
    assert {output.num_cached_tokens for output in outputs} == {1}
