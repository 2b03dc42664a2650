"""What a request may be, before anything is asked of an engine or the table."""

import asyncio
import gc
import json
from typing import Any

import pytest

from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.router.request import ClientRequest, read_request

SETTINGS = Settings()


def read(body: Any, path: str = "/v1/chat/completions") -> ClientRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw}

    scope = {"type": "http", "path": path, "headers": []}
    request = asyncio.run(read_request(scope, receive, SETTINGS))
    assert request is not None
    return request


def refused(body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(body)
    assert error.value.status == 400
    assert len(error.value.message) < 300
    return error.value


def test_the_handoff_is_not_for_clients_to_direct_by_either_way() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "kv_transfer_params": {"do_remote_decode": True},
        "vllm_xargs": {"kv_transfer_params": "anything", "mine": 1},
    }
    sent = json.loads(read(body).raw)
    assert "kv_transfer_params" not in sent
    assert sent["vllm_xargs"] == {"mine": 1}
    assert json.loads(read({**body, "vllm_xargs": "odd"}).raw)["vllm_xargs"] == "odd"


def test_a_chat_of_too_many_messages_is_refused() -> None:
    """Each would be hashed while nobody's tokens are passed on."""
    message = {"role": "user", "content": ""}
    assert (
        "16384 messages, and this one has 16385" in refused({"messages": [message] * 16385}).message
    )
    assert read({"messages": [message] * 16384}).chat


def test_parts_count_over_all_messages() -> None:
    def chat(*counts: int) -> dict[str, Any]:
        part = {"type": "text", "text": ""}
        return {"messages": [{"role": "user", "content": [part] * count} for count in counts]}

    assert "16384 parts" in refused(chat(16_000, 385)).message
    assert read(chat(16_000, 384)).chat


@pytest.mark.parametrize("part", [[], 5, None, [[[]]]])
def test_a_part_is_an_object_or_a_string(part: Any) -> None:
    error = refused({"messages": [{"role": "user", "content": ["x", part]}]})
    assert "messages[0].content" in error.message
    assert error.param == "messages"


def test_the_collector_is_on_again_after_a_body_good_or_bad() -> None:
    assert gc.isenabled()
    read({"messages": [{"role": "user", "content": "x"}]})
    assert gc.isenabled()
    refused(b"{not json")
    assert gc.isenabled()
    gc.disable()
    try:
        refused(b"[1]")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_table_gets_the_newest_candidates() -> None:
    messages: list[dict[str, str]] = []
    for turn in range(100):
        messages += [{"role": "user", "content": f"{turn}"}, {"role": "assistant", "content": "a"}]
    messages.append({"role": "user", "content": "last"})
    candidates = read({"messages": messages}).candidates
    assert len(candidates) == 64
    # The longest beginning is the one that the last answer ends.
    shorter = read({"messages": messages[:-2]}).candidates
    assert candidates[1:] == shorter[:63]
