"""Streams of Messages and Responses, made by vLLM's own code, that go on at another decoder."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.renderers.chat_utils import make_tool_call_id

from conserve.apis import MESSAGES, RESPONSES
from conserve.recognition.apis import answers_of
from conserve.wire import Emitted, note, read_notes
from deployments.engine import response_events
from deployments.engine.response_events import AgreeingResponse
from deployments.router.upstream import StreamRecord

TOKENS = [Emitted([token]) for token in range(5)]


def _call(index: int, arguments: str, name: str | None = None) -> DeltaMessage:
    # As vLLM has it: an id is made up as the call begins.
    id_ = None if name is None else make_tool_call_id()
    function = DeltaFunctionCall(name=name, arguments=arguments)
    return DeltaMessage(tool_calls=[DeltaToolCall(index=index, id=id_, function=function)])


def _deltas() -> list[DeltaMessage]:
    """What the parsers make of five outputs: reasoning, a text, and two calls."""
    return [
        DeltaMessage(reasoning="hm"),
        DeltaMessage(content='a "id":"x" '),
        DeltaMessage(content="b"),
        _call(0, "{}", "read"),
        _call(1, '{"a": 1}', "write"),
    ]


def messages_events(id_: str = "chatcmpl-abc") -> list[bytes]:
    """A Messages stream with its notes."""
    ahead: list[Emitted] = []

    async def chunks() -> AsyncIterator[str]:
        head = {"id": id_, "created": 1, "model": "m", "object": "chat.completion.chunk"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}

        def chunk(delta: Any, reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return f"data: {json.dumps({**head, 'choices': [choice], 'usage': usage})}\n\n"

        for number, delta in enumerate(_deltas()):
            ahead.append(TOKENS[number])
            if not number:
                yield chunk({"role": "assistant", "content": ""})
            yield chunk(delta.model_dump(exclude_none=True))
        yield chunk({}, "tool_calls")
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    server: Any = SimpleNamespace(stop_reason_map={"tool_calls": "tool_use"})
    converted = AnthropicServingMessages.message_stream_converter(server, chunks())  # type: ignore[arg-type]

    async def noted() -> list[bytes]:
        found = []
        async for event in converted:
            found.append((note(ahead) if ahead else b"") + event.encode())
            ahead.clear()
        return found

    return asyncio.run(noted())


def responses_events(created: int = 100) -> list[bytes]:
    """A Responses stream with its notes, as a decoder sends it."""
    made: list[tuple[bytes, Emitted | None]] = []

    def put(event: dict[str, Any], emitted: Emitted | None = None) -> None:
        data = json.dumps({**event, "sequence_number": len(made)}, separators=(",", ":"))
        made.append((f"event: {event['type']}\ndata: {data}\n\n".encode(), emitted))

    response: dict[str, Any] = {"id": "resp_1", "created_at": created, "object": "response"}
    for kind in ("response.created", "response.in_progress"):
        put({"type": kind, "response": {**response, "status": "in_progress", "output": []}})
    processor = SimpleStreamingEventProcessor()
    output: Any = None
    for emitted, delta in zip(TOKENS, _deltas(), strict=True):
        target, call = processor.resolve_target_state(delta)
        events: list[Any] = []
        if processor.needs_transition(target, call):
            events += processor.close_current()
            events += processor.open(target, call)
        events += processor.emit_delta(delta, output, lambda _: [])
        for event in events:
            put(event.model_dump(exclude={"sequence_number"}, mode="json"), emitted)
            emitted = None
    for event in processor.close_current():
        put(event.model_dump(exclude={"sequence_number"}, mode="json"))
    put({"type": "response.completed", "response": {**response, "status": "completed",
                                                    "output": []}})  # fmt: skip
    return asyncio.run(_noted(made))


async def _noted(made: list[tuple[bytes, Emitted | None]]) -> list[bytes]:
    found: list[bytes] = []
    ahead: list[Emitted] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            found.append((note(ahead) if ahead else b"") + message["body"])
            ahead.clear()

    agreeing = AgreeingResponse(send, "resp_1", {})
    headers = [(b"content-type", b"text/event-stream")]
    await agreeing.send({"type": "http.response.start", "status": 200, "headers": headers})
    for event, emitted in made:
        ahead += [] if emitted is None else [emitted]
        await agreeing.send({"type": "http.response.body", "body": event, "more_body": True})
    return found


STREAMS = {MESSAGES: messages_events, RESPONSES: responses_events}


def plain(events: list[bytes]) -> bytes:
    """The same without notes."""
    return b"".join(b"event: " + event.partition(b"event: ")[2] for event in events)


def told(path: str, stream: bytes) -> list[Any]:
    """Events without what vLLM draws by chance, ids by their order."""
    events = [json.loads(event.partition(b"data: ")[2]) for event in stream.split(b"\n\n") if event]
    text = json.dumps(events)
    names: dict[str, str] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("id", "item_id", "call_id", "signature") and isinstance(inner, str):
                    names.setdefault(inner, f"#{len(names)}")
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(events)
    for name, short in names.items():
        text = text.replace(name, short)
    found: list[Any] = json.loads(text)
    return found


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_goes_on_is_one_to_its_client_wherever_it_was_cut(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A response says in which second it was completed, and each is made many times here.
    monkeypatch.setattr(response_events, "time", SimpleNamespace(time=lambda: 300.0))
    make = STREAMS[path]
    whole = make()
    expected = told(path, plain(whole))
    (answer,) = answers_of(path, [plain(whole)], True)
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["read", "write"]
    for cut in range(1, len(whole)):
        record = StreamRecord(path)
        first = make()
        got = record.take(b"".join(first[:cut]) + first[cut][:7])
        assert record.can_resume
        assert not record.done
        record.resume()
        anew = make() if path == MESSAGES else responses_events(created=200)
        got += record.take(b"".join(anew))
        assert told(path, got) == expected, cut
        if path == RESPONSES:
            # Whichever decoder keeps it, it has the ids that the client has seen.
            assert got.split(b"\n\n")[-2] == plain(whole).split(b"\n\n")[-2]
        assert record.done
        assert read_notes(bytes(record.notes)) == TOKENS
        if path == RESPONSES:
            assert b'"created_at":200' not in got
        else:
            assert record.request_id == "abc"


def test_a_message_that_goes_on_has_the_id_that_it_had() -> None:
    record = StreamRecord(MESSAGES)
    record.take(b"".join(messages_events("msg_abc")[:2]))
    # By this the decoder that goes on names it.
    assert record.request_id == "abc"


def test_ids_stay_through_two_losses() -> None:
    whole = responses_events()
    record = StreamRecord(RESPONSES)
    got = record.take(b"".join(whole[:8]))
    for cut in (12, len(whole)):
        record.resume()
        got += record.take(b"".join(responses_events()[:cut]))
    assert got == plain(whole)


def test_what_comes_before_the_first_token_can_be_begun_anew() -> None:
    record = StreamRecord(RESPONSES)
    whole = responses_events()
    assert not record.can_resume
    record.take(whole[0])
    assert record.can_resume
    assert not record.notes
    # Not if there is output of which nothing is known.
    record.take(whole[1] + whole[2].partition(b"\n")[2])
    assert not record.can_resume


def test_what_is_said_of_caches_stays_through_a_loss() -> None:
    """The decoder that goes on has found something else, and says nothing of it."""

    def usage_of(event: bytes) -> dict[str, int]:
        data = json.loads(event.partition(b"data: ")[2])
        usage: dict[str, int] = data.get("message", data)["usage"]
        return usage

    def told(event: bytes, **usage: int) -> bytes:
        name, _, data = event.partition(b"data: ")
        changed = json.loads(data)
        changed.get("message", changed)["usage"] = usage
        return name + b"data: " + json.dumps(changed).encode() + b"\n\n"

    found = {"cache_read_input_tokens": 7, "cache_creation_input_tokens": 0}
    whole = messages_events()
    first = told(whole[0], input_tokens=2, output_tokens=0, **found)
    anew = [*messages_events()[:-2], told(whole[-2], input_tokens=9, output_tokens=5), whole[-1]]
    for cut in range(1, len(whole) - 1):
        record = StreamRecord(MESSAGES)
        record.resume()
        got = record.take(first + b"".join(whole[1:cut]))
        record.resume()
        got += record.take(b"".join(anew))
        start, *_, delta, _ = [event for event in got.split(b"\n\n") if event]
        assert usage_of(start) == {"input_tokens": 2, "output_tokens": 0, **found}
        assert usage_of(delta) == {"input_tokens": 2, "output_tokens": 5, **found}
        assert json.loads(delta.partition(b"data: ")[2])["delta"]["stop_reason"] == "tool_use"
    # What one decoder says from beginning to end is passed on as it is.
    record = StreamRecord(MESSAGES)
    record.resume()
    assert record.take(first + b"".join(anew[1:])).endswith(plain(anew[-2:]))


@pytest.mark.parametrize("began", [True, False])
def test_an_error_of_messages_is_told_in_words_for_its_client(began: bool) -> None:
    theirs = (
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error",'
        b'"message":"1 validation error for ChatCompletionStreamResponse"}}\n\n'
    )
    record = StreamRecord(MESSAGES)
    if began:
        record.take(messages_events()[0])
    # It is not passed on: the stream may go on elsewhere, or begin anew.
    assert record.take(theirs) == b""
    shown = record.error
    assert shown is not None
    assert shown.startswith(b"event: error\ndata: {")
    assert b"validation" not in shown
    error = json.loads(shown.partition(b"data: ")[2])
    assert error["error"]["type"] == "api_error"
