"""Has an engine load prompts that host memory has, and nothing that it has not."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from conserve.turn import TurnStats
from deployments.engine.copies import Copies

pytestmark = pytest.mark.anyio


class Servers:
    """LMCache's server and the engine, of which either may fail."""

    def __init__(self) -> None:
        self.found_keys = 0
        self.looks = 0
        self.looked_up: list[Any] = []
        self.prefilled: list[Any] = []
        self.engine_status = 200
        self.url = ""

    async def look_up(self, request: web.Request) -> web.Response:
        self.looked_up.append(await request.json())
        return web.json_response({"request_id": "r"}, status=202)

    async def status(self, _: web.Request) -> web.Response:
        self.looks += 1
        if self.looks % 2:
            return web.json_response({"status": "pending"})
        return web.json_response({"status": "completed", "found_keys": self.found_keys})

    async def prefill(self, request: web.Request) -> web.Response:
        self.prefilled.append(body := await request.json())
        stats = TurnStats(prefiller_cached_tokens=len(body["prompt"]) - 1)
        return web.Response(body=msgspec.json.encode(stats), status=self.engine_status)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    app = web.Application()
    app.add_routes(
        [
            web.post("/cache/prefetches", servers.look_up),
            web.get("/cache/prefetches/r", servers.status),
            web.post("/conserve/prefill/v1/completions", servers.prefill),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    servers.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield servers
    await runner.cleanup()


def copies(url: str, ranks: int = 1) -> Copies:
    model = SimpleNamespace(model="m", use_mla=False)
    parallel = SimpleNamespace(world_size=ranks, pipeline_parallel_size=1)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    return Copies(url, config, most_tokens=100, chunk_tokens=4)


@pytest.mark.parametrize(("ranks", "keys", "tokens"), [(1, 2, 8), (2, 4, 8), (2, 2, 4), (1, 3, 12)])
async def test_the_chunks_that_are_there_are_asked_for_and_one_token(
    servers: Servers, ranks: int, keys: int, tokens: int
) -> None:
    kept = copies(servers.url, ranks)
    kept.keep("a", list(range(12)), "salt")
    servers.found_keys = keys
    assert await kept.load("a", servers.url, "model") == tokens
    expected = [*range(tokens), 11]
    (body,) = servers.prefilled
    assert body == {"model": "model", "prompt": expected, "max_tokens": 1, "cache_salt": "salt"}
    (asked,) = servers.looked_up
    assert (asked["token_ids"], asked["cache_salt"]) == (list(range(12)), "salt")


async def test_nothing_is_asked_of_the_engine_for_what_is_not_there(servers: Servers) -> None:
    kept = copies(servers.url)
    kept.keep("a", list(range(12)), "")
    assert await kept.load("a", servers.url, "model") == 0
    # Its prompt is not known: it was computed elsewhere, or it has images.
    assert await kept.load("b", servers.url, "model") == 0
    assert (len(servers.looked_up), servers.prefilled) == (1, [])


async def test_an_engine_that_refuses_has_loaded_nothing(servers: Servers) -> None:
    kept = copies(servers.url)
    kept.keep("a", list(range(12)), "")
    servers.found_keys, servers.engine_status = 3, 400
    assert await kept.load("a", servers.url, "model") == 0
    assert "cache_salt" not in servers.prefilled[0]
    lost = copies("http://127.0.0.1:1")
    lost.keep("a", list(range(12)), "")
    assert await lost.load("a", servers.url, "model") == 0
