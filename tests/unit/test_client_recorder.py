"""The recorder before the router: what it passes on, keeps and refuses, and the usage it reads."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.engines.clients.driving import ids_sent
from tests.engines.clients.recorder import Exchange, Recorder, Usage

pytestmark = pytest.mark.anyio

TURN = {
    "prompt_tokens": 9, "output_tokens": 1, "decoder_cached_tokens": 3, "lmcache_tokens": 4,
}  # fmt: skip


@pytest.fixture
async def target(anyio_backend: str) -> AsyncIterator[str]:
    """A server that streams what it got, and knows one conversation."""

    async def turn(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(
            status=201, headers={"X-Conversation-Id": "a b", "X-ConServe-Decoder": "d"}
        )
        await answer.prepare(request)
        for part in (b"data: ", await request.read(), b"\n\n"):
            await answer.write(part)
        return answer

    async def conversation(request: web.Request) -> web.Response:
        assert request.match_info["id"] == "a b"
        return web.json_response({"last_turn": TURN})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", turn)
    app.router.add_get("/v1/conversations/{id}", conversation)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_it_passes_on_and_keeps(target: str) -> None:
    async with Recorder(target) as recorder, httpx.AsyncClient() as client:
        answer = await client.post(
            recorder.url + "/v1/chat/completions", json={"user": "x"}, headers={"Session-Id": "s"}
        )
    assert (answer.status_code, answer.content) == (201, b'data: {"user":"x"}\n\n')
    (exchange,) = recorder.exchanges
    assert exchange.headers["session-id"] == "s"
    assert (exchange.body, exchange.status, exchange.answer) == (
        {"user": "x"}, 201, answer.content,
    )  # fmt: skip
    assert (exchange.conversation, exchange.decoder, exchange.turn) == ("a b", "d", TURN)
    assert exchange.usage == Usage(9, 7, 1)
    assert not recorder.outside


async def test_it_refuses_what_is_elsewhere(target: str) -> None:
    async with (
        Recorder(target) as recorder,
        httpx.AsyncClient(proxy=recorder.url, trust_env=False) as client,
    ):
        assert (await client.get("http://elsewhere.test/x")).status_code == 403
        with pytest.raises(httpx.ProxyError):
            await client.get("https://elsewhere.test/x")
    assert recorder.outside == [
        "GET http://elsewhere.test/x",
        "CONNECT elsewhere.test:443",
    ]
    assert not recorder.exchanges


def exchange(answer: bytes, body: object = None) -> Exchange:
    return Exchange("POST", "/", {"x-session-id": "s"}, body, 200, {}, answer, None)


def stream(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps(
            {
                "usage": {
                    "prompt_tokens": 9,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 5},
                }
            }
        ).encode(),
        stream(
            {"type": "response.created", "response": {"usage": None}},
            {
                "type": "response.completed",
                "response": {
                    "usage": {
                        "input_tokens": 9,
                        "output_tokens": 2,
                        "input_tokens_details": {"cached_tokens": 5},
                    }
                },
            },
        ),
        stream(
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 9, "output_tokens": 0}},
            },
            {
                "type": "message_delta",
                "usage": {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 2},
            },
        ),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_usage_is_read_in_each_api(answer: bytes) -> None:
    assert exchange(answer).usage == Usage(9, 5, 2)


async def test_ids_are_found_wherever_they_stand() -> None:
    body = {
        "model": "m",
        "messages": [{"session_id": "no"}],
        "prompt_cache_key": "k",
        "metadata": {"user_id": "u", "kind": "no"},
    }
    assert dict(ids_sent(exchange(b"", body))) == {
        "x-session-id": "s",
        "prompt_cache_key": "k",
        "metadata.user_id": "u",
    }
