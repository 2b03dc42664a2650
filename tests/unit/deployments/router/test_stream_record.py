"""What is passed on of a stream, and what is kept of it, however its bytes come."""

import json

import pytest

from conserve import wire
from conserve.turn import TurnStats
from conserve.wire import Emitted, note, read_notes
from deployments.router.upstream import StreamRecord


def _event(text: str, created: int = 1700000000, **choice: object) -> bytes:
    body = {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": created,
        "choices": [{"index": 0, "delta": {"content": text}, **choice}],
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
# The first output is two events, and the third of the outputs is none.
EMITTED = [[Emitted([5])], [], [Emitted([6, 7]), Emitted([8])], [Emitted([9], "stop", "\n\n")]]
TEXTS = ["", 'a "created":1 ', "b\n\n", "c"]


def _stream(created: int = 1700000000) -> list[tuple[bytes, bytes]]:
    """Each event's note, and the event."""
    return [
        (note(emitted) if emitted else b"", _event(text, created))
        for emitted, text in zip(EMITTED, TEXTS, strict=True)
    ]


def test_events_are_passed_on_without_their_notes_however_the_bytes_come() -> None:
    # The engine's own comments are left out; a note may come beside one, before its event.
    own = b": processing\n\n"
    whole = own + b"".join(before + own + event for before, event in _stream()) + DONE
    expected = b"".join(event for _, event in _stream()) + DONE
    for size in range(1, len(whole) + 1):
        record = StreamRecord()
        parts = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert b"".join(record.take(part) for part in parts) == expected
        assert read_notes(bytes(record.notes)) == [one for event in EMITTED for one in event]
        assert record.done
        assert record.request_id == "abc"


def test_what_the_decoder_tells_of_a_turn_is_kept_and_not_passed_on() -> None:
    told = TurnStats(600, 4, 128, 256, engine_queued_s=0.5)
    expected = b"".join(event for _, event in _stream()) + DONE
    whole = b"".join(before + event for before, event in _stream()) + note(told) + DONE
    for size in (1, 7, len(whole)):
        record = StreamRecord(continues=False)
        parts = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert b"".join(record.take(part) for part in parts) == expected
        assert record.stats == told
        assert record.done
        assert wire.SUMMARY_MARK not in record.notes
        # Whatever is noted, nothing goes on that is not to.
        assert not record.can_resume


def test_a_stream_that_goes_on_is_one_to_its_client_wherever_it_was_cut() -> None:
    whole = b"".join(before + event for before, event in _stream()) + DONE
    anew = b"".join(before + event for before, event in _stream(created=1800000000)) + DONE
    expected = b"".join(event for _, event in _stream()) + DONE
    first_event = len(b"".join(_stream()[0]))
    for cut in range(first_event, len(whole)):
        for again in (0, first_event, len(anew) - 1):
            record = StreamRecord()
            got = record.take(whole[:cut])
            assert record.can_resume
            before = bytes(record.notes)
            # One that is lost as well, perhaps before it was as far as the first.
            record.resume()
            got += record.take(anew[:again])
            assert bytes(record.notes).startswith(before)
            record.resume()
            got += record.take(anew)
            assert got == expected
            assert read_notes(bytes(record.notes)) == [one for event in EMITTED for one in event]


def test_what_is_not_known_to_be_whole_is_not_noted() -> None:
    record = StreamRecord()
    (before, event), *_ = _stream()
    assert record.take(before + event[:-1]) == b""
    assert not record.can_resume
    assert record.take(event[-1:]) == event
    assert record.can_resume


@pytest.mark.parametrize("began", [True, False])
def test_an_error_is_kept_back_where_the_stream_can_go_on_or_begin(began: bool) -> None:
    error = b'data: {"error":{"message":"gone"}}\n\n'
    record = StreamRecord()
    if began:
        record.take(b"".join(_stream()[0]))
    # And what vLLM puts behind it, alone or with it.
    assert record.take(error + b"data: [DONE]\n\n") == b""
    assert record.take(b"data: [DONE]\n\n") == b""
    assert record.error == error
    assert not record.done


def test_an_error_after_an_event_without_notes_is_passed_on() -> None:
    error = b'data: {"error":{"message":"gone"}}\n\n'
    record = StreamRecord()
    record.take(_event("a"))
    assert record.take(error) == error
    assert record.error is None
