"""Requests with tools and a format of the answer, in vLLM's own parsers and grammars.

The model is a stand-in: of a few texts it says the first one that the request's grammar takes.
"""

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer
from vllm import CompletionOutput, RequestOutput
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.v1.engine.async_llm import AsyncLLM
from xgrammar.testing import _is_grammar_accept_string

from conserve.embedded import model_path
from conserve.parsers import TOOL_TOKENS, deepseek
from conserve.wire import STATS
from deployments.upstream.cut_calls import _calls_in

TEXT, NUMBER = {"type": "string"}, {"type": "number", "multipleOf": 3}
PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


def accepts(outputs: Any, text: str) -> bool:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(outputs.json or {"type": "object"}))
    if outputs.structural_tag:
        grammar = xgrammar.Grammar.from_structural_tag(outputs.structural_tag)
    return _is_grammar_accept_string(grammar, text)


async def say(model: Any, _: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
    """Stand in for ``AsyncLLM.generate``: each choice is the next text that fits."""
    model.runs += 1
    held, choices = params.structured_outputs, []
    fit = [one for one in model.texts if held is None or accepts(held, one)]
    for index in range(params.n):
        ids = model.tokenizer.encode(fit[min(index, len(fit) - 1)], add_special_tokens=False)
        text = model.tokenizer.decode(ids[: params.max_tokens])
        stops = {at: stop for stop in params.stop if (at := text.find(stop)) >= 0}
        end, stop = min(stops.items(), default=(len(text), None))
        end += len(stop or "") * params.include_stop_str_in_output
        choices.append(CompletionOutput(index, text[:end], [], None, None, stop_reason=stop))
    told: Any = {"num_cached_tokens": model.runs, "kv_transfer_params": {STATS: model.runs}}
    yield RequestOutput(request_id, None, [1], None, choices, True, **told)


@pytest.fixture(autouse=True)
def saying(unpatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncLLM, "generate", say)


def request(said: Any = TEXT, *, strict: bool = False, responds: bool = False, **more: Any) -> Any:
    fields = {"properties": {"said": said}, "required": ["said"], "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "r", "schema": {"type": "object", **fields}}
    function = {"name": "look_up", "parameters": PARAMETERS, "strict": strict}
    if responds:
        body = {"model": "m", "input": "x", "text": {"format": wanted}, **more}
        body["tools"] = [{"type": "function", **function}]
        return ResponsesRequest.model_validate(body)
    form = {"response_format": {"type": "json_schema", "json_schema": wanted}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **form, **more}
    body["tools"] = [{"type": "function", "function": function}]
    return ChatCompletionRequest.model_validate(body)


def run(name: str, thought: str, *texts: str, **asked: Any) -> list[Any]:
    """Return the text and calls that a parser reads in each choice, whole and streamed."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path()))
    marks = map(deepseek, ("tool▁call▁begin", "tool▁sep", "tool▁call▁end"))
    more = [*TOOL_TOKENS.get(name, ()), *marks, "<think>", "</think>"]
    tokenizer.add_tokens(more, special_tokens=True)
    made: Any = ParserManager.get_parser(name, "qwen3" if thought else None, True, "m")
    wanted, about = request(**asked), {"model_config": None, "chat_template_kwargs": {}}
    parser = functools.partial(made, tokenizer, wanted.tools, **about)
    parser().adjust_request(wanted)
    model: Any = SimpleNamespace(tokenizer=tokenizer, texts=texts, runs=0)
    outputs = AsyncLLM.generate(model, {}, wanted.to_sampling_params(500, {}), "r")
    output = asyncio.run(outputs.__anext__())
    # What a look-ahead has put into the cache does not count.
    assert (output.num_cached_tokens, output.kv_transfer_params) == (1, {STATS: 1})
    found: list[Any] = []
    for text in (thought + choice.text for choice in output.outputs):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found.append(parser().parse(text, wanted, True, ids)[1:])
        reads, told, parts = parser(), "", []
        for end, token in enumerate(ids, 1):
            told, before = tokenizer.decode(ids[:end]), told
            new, is_last = told.removeprefix(before), end == len(ids)
            parts += filter(None, [reads.parse_delta(new, [token], wanted, [1], finished=is_last)])
        calls = SimpleNamespace(tool_calls=[call for part in parts for call in part.tool_calls])
        found.append(("".join(part.content or "" for part in parts), _calls_in(calls)))
    return [
        ((text or "").strip(), [(call.name, json.loads(call.arguments)) for call in calls or ()])
        for text, calls in found
    ]


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"on": true}}\n</tool_call>'
UNFIT, CALLED = CALL.replace("true", "0"), ("look_up", {"on": True})
PROSE, ANSWER = "It is on, as far as I can see.", '{"said":"It is on."}'
QUOTE, THOUGHT = json.dumps({"said": f"It wrote {CALL}"}), "<think>\nIs it on?\n</think>"
# How models write the call.
WRITTEN = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=on>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama3_json": '{"name": "look_up", "parameters": {"on": true}}',
    "deepseek_v31": '<|tool▁calls▁begin|><|tool▁call▁begin|>look_up<|tool▁sep|>{"on": true}'
    "<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", "\uff5c"),
    "pythonic": "[look_up(on=True)]",
    "mistral": '[TOOL_CALLS][{"name": "look_up", "arguments": {"on": true}}]',
}
NAMED = {"type": "function", "function": {"name": "look_up"}}
# A client's own format, by which its tool is called.
OWN = {"type": "structural_tag", "format": {
    "type": "tag", "begin": CALL[: CALL.index('{"on')], "end": "}\n</tool_call>",
    "content": {"type": "json_schema", "json_schema": PARAMETERS}}}  # fmt: skip
HERMES, THINKS = ("hermes", ""), ("hermes", THOUGHT)
# The texts that a model would like to say, what is asked for, and what comes.
CASES: list[Any] = [
    (HERMES, [CALL], {"tool_choice": None}, ("", [CALLED])),
    (HERMES, [f"On.{CALL}", ANSWER], {}, ("On.", [CALLED])),
    (HERMES, [f"{CALL}\n{CALL}"], {"include_stop_str_in_output": True}, ("", [CALLED] * 2)),
    (HERMES, [f"On.{UNFIT}", "On.", f"On.{CALL}\n{CALL}"], {"strict": True}, ("On.", [CALLED] * 2)),
    (HERMES, [CALL * 2, CALL], {"strict": True, "parallel_tool_calls": False}, ("", [CALLED])),
    (HERMES, [PROSE, ANSWER], {}, (ANSWER, [])),
    (HERMES, [PROSE * 9 + CALL, ANSWER], {}, (ANSWER, [])),
    (HERMES, [PROSE, QUOTE], {}, (QUOTE, [])),
    (HERMES, [CALL, ANSWER], {"tool_choice": "none"}, (ANSWER, [])),
    (HERMES, [ANSWER, CALL[:40], CALL], {"tool_choice": "required"}, ("", [CALLED])),
    (HERMES, [ANSWER, CALL[:40], CALL], {"tool_choice": NAMED}, ("", [CALLED])),
    (HERMES, [PROSE, '{"said":3}'], {"said": NUMBER}, ('{"said":3}', [])),
    (HERMES, [PROSE, "{}"], {"response_format": {"type": "json_object"}}, ("{}", [])),
    (HERMES, [UNFIT, CALL], {"response_format": OWN}, ("", [CALLED])),
    (HERMES, [f"On.{CALL}", f"On.{CALL * 2}"], {"n": 2}, ("On.", [CALLED]), ("On.", [CALLED] * 2)),
    (HERMES, [CALL], {"responds": True}, ("", [CALLED])),
    (HERMES, [PROSE, QUOTE], {"responds": True}, (QUOTE, [])),
    (THINKS, [f"{CALL}\n{CALL}", QUOTE], {"n": 2}, ("", [CALLED] * 2), (QUOTE, [])),
    (THINKS, [UNFIT, CALL, QUOTE], {"n": 2, "strict": True}, ("", [CALLED]), (QUOTE, [])),
    (("mistral", ""), [ANSWER, WRITTEN["mistral"]], {"tool_choice": "required"}, ("", [CALLED])),
    (("kimi_k3", ""), [PROSE], {"response_format": None}, (PROSE, [])),
]

for name, call in WRITTEN.items():
    quote = json.dumps({"said": f"It wrote {call}"})
    for one in [(name, ""), (name, THOUGHT)][: 1 if name == "llama3_json" else 2]:
        CASES += [(one, [call], {}, ("", [CALLED])), (one, [PROSE, quote], {}, (quote, []))]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("case", CASES)
def test_a_model_calls_or_answers_in_the_format(case: Any) -> None:
    model, texts, asked, *found = case
    assert run(*model, *texts, **asked) == [one for one in found for _ in range(2)]


# With reasoning, Llama's calls begin as an answer may; GigaChat's beginnings are not known.
REFUSED: list[Any] = [
    (("gigachat3", ""), {}), (("gigachat3", ""), {"responds": True}),
    (("llama3_json", THOUGHT), {}), (THINKS, {"said": NUMBER}),
]  # fmt: skip


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("model", "asked"), REFUSED)
def test_what_would_never_call_is_refused(model: Any, asked: Any) -> None:
    with pytest.raises(VLLMValidationError, match="send either tools or a format") as refused:
        run(*model, CALL, **asked)
    assert refused.value.parameter == ("text.format" if "responds" in asked else "response_format")
    assert run(*model, ANSWER, '{"said":3}', tool_choice="none", **asked)


def test_vllm_takes_no_call_where_an_answer_has_a_format() -> None:
    with pytest.raises(IndexError):
        run(*HERMES, CALL)
