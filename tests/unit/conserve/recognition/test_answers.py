"""Answers are read from bodies and streams."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.recognition import answers_from_body, answers_from_stream
from tests.unit.conserve.recognition.digests import tail_digest
from tests.unit.conserve.recognition.messages import SEEDS, USER, Message, random_answer, said


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def chunk(delta: Any, index: int = 0, finish: str | None = None) -> Any:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1,
            "model": "m", "choices": [choice]}  # fmt: skip


def call_delta(index: int, id: str | None = None, **function: Any) -> Any:
    delta: Any = {"index": index, "function": function}
    return {**delta, "id": id, "type": "function"} if id else delta


DONE = b"data: [DONE]\n\n"


def body_of(answers: list[Message]) -> bytes:
    choices = [{"index": i, "message": m, "finish_reason": "stop"} for i, m in enumerate(answers)]
    return json.dumps({"object": "chat.completion", "choices": choices, "usage": {}}).encode()


def stream_of(answers: list[Message], rng: random.Random) -> bytes:
    """The answers as an engine streams them: the choices interleaved, all else in pieces."""

    def pieces(text: str) -> Iterator[str]:
        while text:
            size = rng.randint(1, 5)
            yield text[:size]
            text = text[size:]

    def deltas(answer: Message) -> Iterator[Any]:
        yield {"role": "assistant", "content": ""}
        for piece in pieces(answer.get("reasoning_content") or ""):
            yield {"reasoning_content": piece}
        for piece in pieces(answer["content"] or ""):
            yield {"content": piece}
        for place, call in enumerate(answer["tool_calls"]):
            function = call["function"]
            yield {"tool_calls": [call_delta(place, call["id"], name=function["name"])]}
            for piece in pieces(function["arguments"]):
                yield {"tool_calls": [call_delta(place, arguments=piece)]}

    events = b": a comment\n\n"
    queues = [(index, list(deltas(answer))) for index, answer in enumerate(answers)]
    while queues:
        index, queue = queues.pop(rng.randrange(len(queues)))
        if queue:
            events += event(chunk(queue.pop(0), index))
            queues.append((index, queue))
        else:
            events += event(chunk({}, index, "stop")) + rng.choice([b"", b": ping\n\n"])
    return events + event({"choices": [], "usage": {"total_tokens": 7}}) + DONE


def cut(data: bytes, rng: random.Random) -> Iterator[bytes]:
    while data:
        size = rng.choice([1, 2, 7, 100, 1000])
        yield data[:size]
        data = data[size:]


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 3))
def test_streamed_and_not_is_the_same_answer(seed: int, many: int) -> None:
    rng = random.Random(seed)
    answers = [random_answer(rng) for _ in range(many)]
    whole = answers_from_body(body_of(answers))
    assert whole == answers
    streamed = answers_from_stream(cut(stream_of(answers, rng), rng))
    assert len(streamed) == many
    for one, other in zip(whole, streamed, strict=True):
        assert tail_digest([USER], one) == tail_digest([USER], other)
        assert (one["content"] or None) == other["content"]
        assert one["tool_calls"] == other.get("tool_calls", [])


def test_a_streamed_answer() -> None:
    stream = [
        event(chunk({"role": "assistant", "content": ""})),
        event(chunk({"reasoning": "Let me", "reasoning_content": " see"})),
        event(chunk({"content": "Zü"})),
        event(chunk({"content": "rich"})),
        event(chunk({"tool_calls": [call_delta(0, "a", name="search", arguments="")]})),
        event(chunk({"tool_calls": [call_delta(0, arguments='{"q"')]})),
        event(chunk({"tool_calls": [call_delta(1, "b", name="book", arguments="{}"),
                                    call_delta(0, arguments=": 1}")]})),
        event(chunk({}, finish="tool_calls")),
        DONE,
    ]  # fmt: skip
    expected = {
        "role": "assistant",
        "content": "Zürich",
        "tool_calls": [
            {"id": "a", "type": "function",
             "function": {"name": "search", "arguments": '{"q": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "book", "arguments": "{}"}},
        ],
    }  # fmt: skip
    data = b"".join(stream)
    assert answers_from_stream([data]) == [expected]
    assert answers_from_stream(data[i : i + 1] for i in range(len(data))) == [expected]
    assert answers_from_stream([data.replace(b"\n", b"\r\n")]) == [expected]
    assert answers_from_stream([data.replace(b"data: ", b"data:")]) == [expected]
    assert answers_from_stream([data.removesuffix(DONE).rstrip()]) == [expected]


def test_calls_come_in_their_order() -> None:
    deltas = [call_delta(1, "b", name="b", arguments=""), call_delta(0, "a", name="a")]
    (answer,) = answers_from_stream([event(chunk({"tool_calls": deltas}, finish="tool_calls"))])
    assert [call["id"] for call in answer["tool_calls"]] == ["a", "b"]


def test_a_cut_stream_gives_no_answer() -> None:
    whole = event(chunk({"content": "Hello"})) + event(chunk({"content": "!"}, finish="stop"))
    assert len(answers_from_stream([whole])) == 1
    for size in range(len(whole) - 3):  # without the last brace and the line breaks
        assert answers_from_stream([whole[:size]]) == []


def test_an_error_leaves_the_finished_choices() -> None:
    stream = [
        event(chunk({"content": "whole"}, 0, "stop")),
        event(chunk({"content": "half"}, 1)),
        event({"error": {"message": "engine died", "code": 500}}),
        DONE,
    ]
    assert answers_from_stream(stream) == [said("whole")]


def test_an_empty_answer_is_an_answer() -> None:
    assert answers_from_stream([event(chunk({}, finish="length"))]) == [said(None)]


@pytest.mark.parametrize(
    "junk", [b"", b"\xff", b"null", b"[]", b'{"choices": 1}', b'{"choices": [{"delta": 1}]}',
             b'{"choices": [{"index": "x"}]}', b'{"choices": [{"message": 1}]}', b'{"error": {}}',
             b'{"a": ' + b"[" * 100_000, b'{"a": "\xff"}',
             b'{"choices": [{"delta": {"content": "\xff"}, "message": {"a": "\xff"}}]}']
)  # fmt: skip
def test_junk_gives_no_answers(junk: bytes) -> None:
    assert answers_from_body(junk) == []
    assert answers_from_stream([junk]) == []
    assert answers_from_stream([b"data: " + junk + b"\n\n"]) == []
    good = event(chunk({"content": "Hi"}, finish="stop"))
    assert answers_from_stream([b"data: " + junk + b"\n\n", good]) == [said("Hi")]
