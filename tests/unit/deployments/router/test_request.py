"""What a request may be, before anything is asked of an engine or the table."""

import asyncio
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


@pytest.mark.parametrize(
    ("kept", "more"),
    [
        # A message, its role and its content.
        (
            [{"role": "user", "content": ""}] * 43_690,
            [{"role": "user", "content": ""}] * 43_691,
        ),
        (
            [{"role": "user", "content": [""] * 131_069}],
            [{"role": "user", "content": [""] * 131_070}],
        ),
        # Wherever they are: within a part, say.
        (
            [{"role": "user", "content": [{"x": [[]] * 131_067}]}],
            [{"role": "user", "content": [{"x": [[]] * 131_068}]}],
        ),
    ],
    ids=["messages", "parts", "within a part"],
)
def test_a_chat_may_hold_so_many_values(kept: list[Any], more: list[Any]) -> None:
    """Each would be hashed while nobody's tokens are passed on."""
    assert read({"messages": kept}).chat
    error = refused({"messages": more})
    assert "131072 values" in error.message
    assert error.param == "messages"


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
