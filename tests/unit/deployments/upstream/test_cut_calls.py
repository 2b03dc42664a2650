"""What vLLM's own code says, by each API, of an answer that was cut while it called a tool."""

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import CompletionOutput, RequestOutput
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.parser import ParserManager

from conserve.embedded import model_path
from tests.unit.deployments.engine.vllm_responses import Answered, bare_server

Json = dict[str, Any]

TEXT = {"type": "string"}
PARAMETERS = {"type": "object", "properties": {"path": TEXT, "text": TEXT}}
NAMES = ("look", "write")
CHAT_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]

# An answer with a whole call and one that is cut, in what models write.
HERMES = (
    'I will.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "write", "arguments": {"path": "/a", "text": "rm -rf /tmp'
)
QWEN = (
    "I will.\n<tool_call>\n<function=look>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=write>\n<parameter=path>\n/a\n</parameter>\n"
    "<parameter=text>\nrm -rf /tmp"
)
PYTHONIC = '[look(), write(path="/a", text="rm -rf /tmp'
ANSWERS = {"hermes": HERMES, "qwen3_coder": QWEN, "pythonic": PYTHONIC}
CALLS = [("look", "{}"), ("write", '{"path": "/a", "text": "rm -rf /tmp')]


class Engine:
    """vLLM's servers of an engine, with one of its parsers and the embedded model's tokenizer."""

    def __init__(self, parser: str = "hermes") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
        parser_cls = ParserManager.get_parser(
            tool_parser_name=parser, enable_auto_tools=True, model_name="m"
        )
        self.chats = bare_server(OpenAIServingChat, self.tokenizer, parser_cls=parser_cls)
        self.messages = AnthropicServingMessages.__new__(AnthropicServingMessages)

    def outputs(self, texts: Sequence[str], ends: Sequence[str], step: int) -> AsyncIterator[Any]:
        """What an engine says: pieces of each text, of so many tokens; or each whole at once."""
        every = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

        async def said() -> AsyncIterator[Any]:
            for at in range(0, max(map(len, every)), step):
                choices = []
                for index, (ids, end) in enumerate(zip(every, ends, strict=True)):
                    before, after = (
                        self.tokenizer.decode(ids[:until]) for until in (at, at + step)
                    )
                    last = at < len(ids) <= at + step
                    piece = CompletionOutput(
                        index, after[len(before) :], ids[at : at + step], None, None,
                        finish_reason=end if last else None,
                    )  # fmt: skip
                    if piece.token_ids:
                        choices.append(piece)
                yield RequestOutput("r", None, [1, 2], None, choices, False)

        return said()

    async def chat(
        self,
        *texts: str,
        ends: Sequence[str] = (),
        stream: bool = False,
        step: int = 3,
        **asked: Any,
    ) -> list[Json]:
        """The choices of an answer, put together if it is a stream."""
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            **{"tools": CHAT_TOOLS, "tool_choice": "auto", "n": len(texts), **asked},
        )
        ends = ends or ["length"] * len(texts)
        about = ("chatcmpl-1", "m", [], self.tokenizer, RequestResponseMetadata(request_id="r"))
        if stream:
            events = self.chats.chat_completion_stream_generator(
                request, self.outputs(texts, ends, step), *about, chat_template_kwargs={}
            )
            return _choices([event async for event in events])
        parser = self.chats._make_parser(request, self.tokenizer, {})
        answer = await self.chats.chat_completion_full_generator(
            request, self.outputs(texts, ends, 100_000), *about, parser=parser
        )
        return [choice.model_dump() for choice in answer.choices]


async def response(text: str, end: str, parser: str = "hermes") -> Json:
    answered = Answered(text, end, parser=parser, tools=RESPONSE_TOOLS)
    whole: Json = json.loads(await answered.body())
    return whole


def _choices(events: list[str]) -> list[Json]:
    assert events[-1] == "data: [DONE]\n\n"
    found: dict[int, Json] = {}
    for event in events[:-1]:
        for one in json.loads(event.removeprefix("data: "))["choices"]:
            choice = found.setdefault(
                one["index"], {"message": {"content": "", "tool_calls": []}, "finish_reason": None}
            )
            message, delta = choice["message"], one["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                call = message["tool_calls"][part["index"]]["function"]
                call["name"] += part["function"].get("name") or ""
                call["arguments"] += part["function"].get("arguments") or ""
            choice["finish_reason"] = one["finish_reason"] or choice["finish_reason"]
    return [choice for _, choice in sorted(found.items())]


def calls_in(choice: Json) -> list[tuple[str, str]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


@pytest.fixture(params=sorted(ANSWERS))
def parser(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(
    ("parser", "told"),
    [
        # Half a call looks whole, without the argument that was being written.
        ("qwen3_coder", ("tool_calls", [CALLS[0], ("write", '{"path": "/a"}')])),
        ("hermes", ("length", [])),
        ("pythonic", ("length", [])),
    ],
)
async def test_vllm_loses_a_call_that_is_cut_in_a_body(parser: str, told: Any) -> None:
    (choice,) = await Engine(parser).chat(ANSWERS[parser])
    assert (choice["finish_reason"], calls_in(choice)) == told
    responded = await response(ANSWERS[parser], "length", parser)
    assert CALLS[1] not in [(one.get("name"), one.get("arguments")) for one in responded["output"]]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_is_a_call_and_the_answer_is_cut(
    parser: str, stream: bool
) -> None:
    (choice,) = await Engine(parser).chat(ANSWERS[parser], stream=stream)
    assert choice["finish_reason"] == "length"
    assert calls_in(choice) == CALLS
    # A client does not take it for all of the arguments.
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(CALLS[1][1])
    text = (choice["message"]["content"] or "").strip()
    assert text == ("" if parser == "pythonic" else "I will.")


@pytest.mark.usefixtures("patched")
async def test_an_answer_that_ends_by_itself_is_told_as_before() -> None:
    whole = HERMES + '"}}\n</tool_call>'
    (choice,) = await Engine().chat(whole, ends=["stop"])
    assert choice["finish_reason"] == "tool_calls"
    assert calls_in(choice) == [CALLS[0], ("write", CALLS[1][1] + '"}')]
    # A model that writes half a call, and is done.
    (choice,) = await Engine().chat(HERMES, ends=["stop"])
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == HERMES


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "write"}}]
)
async def test_a_call_that_had_to_be_made_is_cut_too(choice: Any) -> None:
    text = HERMES.removeprefix("I will.\n")
    (told,) = await Engine().chat(text, tool_choice=choice)
    assert told["finish_reason"] == "length"
    assert calls_in(told) == CALLS
    assert not told["message"]["content"]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
async def test_each_choice_ends_as_it_ended(order: tuple[int, ...]) -> None:
    whole = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    every = [
        (HERMES, "length", "length", CALLS),
        (whole, "stop", "tool_calls", CALLS[:1]),
        ("I will", "length", "length", []),
    ]
    texts, ends, reasons, calls = zip(*(every[index] for index in order), strict=True)
    told = await Engine().chat(*texts, ends=ends)
    assert tuple(one["finish_reason"] for one in told) == reasons
    assert tuple(calls_in(one) for one in told) == calls
    assert told[order.index(2)]["message"]["content"] == "I will"


@pytest.mark.usefixtures("patched")
async def test_a_response_has_the_call_and_is_incomplete(parser: str) -> None:
    told = await response(ANSWERS[parser], "length", parser)
    assert told["status"] == "incomplete"
    calls = [one for one in told["output"] if one["type"] == "function_call"]
    assert [(one["name"], one["arguments"]) for one in calls] == CALLS
    assert len({one["call_id"] for one in calls}) == 2


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("arguments", "left"),
    [('{"on": true}', {"on": True}), ('{"on": [1, 2', {"on": [1, 2]}), ("", {}), ("[1", {})],
)
def test_half_a_call_in_a_message_has_as_much_of_its_input_as_there_is(
    arguments: str, left: Json
) -> None:
    function = {"name": "look", "arguments": arguments}
    called = {"id": "1", "type": "function", "function": function}
    choice = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [called]}}
    chat = ChatCompletionResponse(
        id="chatcmpl-1",
        model="m",
        choices=[{**choice, "finish_reason": "length"}],
        usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    )
    message = Engine().messages.messages_full_converter(chat)
    assert message.stop_reason == "max_tokens"
    (block,) = message.content
    assert (block.name, block.input) == ("look", left)


@pytest.mark.usefixtures("patched")
async def test_a_parser_that_fails_leaves_the_answer_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("not in one piece")

    monkeypatch.setattr(engine.chats.parser_cls, "parse_delta", fails)
    (choice,) = await engine.chat(HERMES)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", HERMES)
