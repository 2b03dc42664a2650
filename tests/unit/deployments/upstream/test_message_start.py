"""What a stream of Messages says of caches at its beginning, by vLLM's own server."""

from typing import Any

import pytest

from conserve.apis import MESSAGES
from conserve.turn import TurnStats
from tests.unit.deployments.engine.vllm_server import MODEL, Server, events

ASKED = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


def usages(server: Server, **more: Any) -> tuple[Any, Any]:
    """Of a stream's first event and of its last."""
    streamed = server.serve(MESSAGES, {**ASKED, "stream": True}, **more)
    start, *_, delta, stop = events(streamed)
    assert (start["type"], delta["type"], stop["type"]) == (
        "message_start", "message_delta", "message_stop",
    )  # fmt: skip
    return start["message"]["usage"], delta["usage"]


def test_vllm_counts_the_whole_prompt_as_computed_at_first() -> None:
    server = Server(cached_tokens=3)
    start, delta = usages(server)
    assert start == {"input_tokens": len(server.prompts[0]), "output_tokens": 0}
    assert delta["input_tokens"] == start["input_tokens"] - 3


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("prefilled", [None, 0, 2])
def test_a_stream_says_the_same_of_caches_in_its_first_event_as_in_its_last(
    prefilled: int | None,
) -> None:
    """And as a body does. Of what a prefiller has just computed, nothing was found."""
    read_tokens = 3 if prefilled is None else prefilled
    server = Server(cached_tokens=3)
    before = TurnStats(prefiller_cached_tokens=prefilled)
    start, delta = usages(server, stats=before)
    body = server.serve(MESSAGES, ASKED, stats=before).json()
    expected = {
        "input_tokens": len(server.prompts[0]) - 3,
        "cache_read_input_tokens": read_tokens,
        "cache_creation_input_tokens": 3 - read_tokens,
    }
    assert start == {**expected, "output_tokens": 0}
    assert delta == body["usage"] == {**expected, "output_tokens": 2}
