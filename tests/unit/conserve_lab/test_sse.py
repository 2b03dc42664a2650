"""Streamed answers: what is read from them, wherever the network cuts them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_lab.sse import AnswerStream, EventSplitter

Chunk = dict[str, Any]


def _event(chunk: Chunk | str) -> bytes:
    text = chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def _text(text: str, finish_reason: str | None = None) -> Chunk:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def _delta(finish_reason: str | None = None, **delta: Any) -> Chunk:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def _call(index: int, arguments: str, **more: str) -> Chunk:
    function = {"arguments": arguments}
    if "name" in more:
        function["name"] = more.pop("name")
    return _delta(tool_calls=[{"index": index, "function": function, **more}])


USAGE: Chunk = {
    "choices": [],
    "usage": {
        "prompt_tokens": 70,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 64},
    },
}


def _read(*parts: bytes) -> AnswerStream:
    stream = AnswerStream()
    for number, part in enumerate(parts):
        stream.feed(part, float(number))
    return stream


def test_a_completion() -> None:
    chunks: list[Chunk | str] = [_text("Hel"), _text("lo"), _text("", "length"), USAGE, "[DONE]"]
    stream = _read(*map(_event, chunks))
    assert stream.answer.content == "Hello"
    assert stream.answer.tool_calls == ()
    assert stream.token_times_s == [0.0, 1.0]
    assert stream.first_token_s == 0.0
    assert stream.finish_reason == "length"
    assert (stream.prompt_tokens, stream.output_tokens, stream.cached_tokens) == (70, 5, 64)
    assert stream.done
    assert stream.error is None


ROLE = _delta(role="assistant", content="")
SILENT_END = [_text("Hi"), _text("", "stop")]
TWO_TOKENS: Chunk = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
SECOND_CHOICE: Chunk = {"choices": [{"index": 1, "text": "no", "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("chunks", "times_s", "content", "finish_reason"),
    [
        # A token without text yet is output. The role and the end of a chat answer are not.
        ([_text(""), _text("é")], [0, 1], "é", None),
        ([ROLE, _delta(content="")], [1], "", None),
        (
            [ROLE, _delta(content="Hi"), _delta("stop", content=""), _delta("stop")],
            [1],
            "Hi",
            "stop",
        ),
        # An end-of-sequence token has no text. It is output where usage counts it.
        ([*SILENT_END, TWO_TOKENS, "[DONE]"], [0, 1], "Hi", "stop"),
        ([*SILENT_END, USAGE, "[DONE]"], [0], "Hi", "stop"),
        ([*SILENT_END, "[DONE]"], [0], "Hi", "stop"),
        ([_text("Hi"), _text("!", "length"), TWO_TOKENS, "[DONE]"], [0, 1], "Hi!", "length"),
        # Only the first choice is read, and nothing after the end.
        ([SECOND_CHOICE, _text("yes")], [1], "yes", None),
        ([_text("a"), "[DONE]", _text("b")], [0], "a", None),
    ],
)
def test_what_counts_as_output(
    chunks: list[Chunk | str], times_s: list[float], content: str, finish_reason: str | None
) -> None:
    stream = _read(*map(_event, chunks))
    assert stream.token_times_s == times_s
    assert (stream.answer.content, stream.finish_reason) == (content, finish_reason)
    assert stream.done == ("[DONE]" in chunks)


def test_reasoning_is_output_but_no_content() -> None:
    for field in ("reasoning", "reasoning_content"):
        chunks = [ROLE, _delta(**{field: "hm"}), _delta(content="4")]
        stream = _read(*map(_event, chunks))
        assert stream.token_times_s == [1.0, 2.0]
        assert (stream.reasoning, stream.answer.content) == ("hm", "4")


def test_tool_calls_are_put_together() -> None:
    chunks: list[Chunk | str] = [
        _delta(role="assistant", content=None),
        _call(0, "", id="call-1", name="add"),
        _call(0, '{"a": 1'),
        _call(1, "{}", id="call-2", name="now"),
        _call(0, "}", name="add"),
        _delta("tool_calls"),
        "[DONE]",
    ]
    stream = _read(*map(_event, chunks))
    assert stream.token_times_s == [1.0, 2.0, 3.0, 4.0]
    assert stream.finish_reason == "tool_calls"
    assert stream.answer.tool_calls == (
        {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "call-2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    )


def test_an_error_event_ends_the_answer() -> None:
    error = {"error": {"message": "the decoder\nwas lost", "type": "server_error"}}
    stream = _read(_event(_text("a")), _event(error), _event(_text("b")), _event("[DONE]"))
    assert stream.error == "the decoder was lost"
    assert stream.answer.content == "a"
    assert not stream.done
    assert _read(_event({"object": "error", "message": "old style"})).error == "old style"
    assert _read(_event({"error": "plain"})).error == "plain"


def test_what_is_no_completion_is_an_error() -> None:
    for payload in ("{broken", '"text"', '{"choices": 3}'):
        stream = _read(_event(payload))
        assert stream.error is not None
        assert payload in stream.error


def test_events_follow_the_format() -> None:
    lines = [
        b": a comment\r\n",
        b"event: token\r\nid: 7\r\ndata:one\r\n\r\n",
        b"data: two\ndata:  lines\n\n\n",
        b"retry: 5\n\n",
        b"data: cut off",
    ]
    assert EventSplitter().feed(b"".join(lines)) == [b"one", b"two\n lines"]


_CHUNKS = st.lists(
    st.one_of(
        st.text(max_size=5).map(_text),
        st.text(max_size=5).map(lambda text: _delta(content=text)),
        st.text(max_size=5).map(lambda text: _call(0, text, name="f")),
        st.just(_delta(role="assistant", content="")),
        st.just(USAGE),
        st.just("[DONE]"),
        st.just({"error": {"message": "lost"}}),
    ),
    max_size=6,
)


@given(_CHUNKS, st.booleans(), st.booleans(), st.data())
def test_any_split_gives_the_same(
    chunks: list[Chunk | str], crlf: bool, comments: bool, data: st.DataObject
) -> None:
    raw = b"".join((b": ping\n\n" if comments else b"") + _event(chunk) for chunk in chunks)
    if crlf:
        raw = raw.replace(b"\n", b"\r\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    edges = [0, *cuts, len(raw)]
    parts = [raw[a:b] for a, b in pairwise(edges)]
    whole, split = _read(raw), _read(*parts)
    assert _facts(split) == _facts(whole)
    assert len(split.token_times_s) == len(whole.token_times_s)
    # A time is that of the part which completes the event.
    assert split.token_times_s == sorted(split.token_times_s)
    assert _facts(_read(*(raw[i : i + 1] for i in range(len(raw))))) == _facts(whole)


def _facts(stream: AnswerStream) -> tuple[object, ...]:
    return (
        stream.answer,
        stream.reasoning,
        stream.finish_reason,
        stream.prompt_tokens,
        stream.output_tokens,
        stream.cached_tokens,
        stream.error,
        stream.done,
    )
