"""Routers that end: their port stays open, and what runs is finished."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from conserve.settings import Settings, SettingsError
from deployments.messages import Timeouts
from deployments.router.listener import Listener
from deployments.router.operators import Probes
from deployments.router.router import Connection, Drain, changed_timeouts

HOST = "127.0.0.1"


@dataclass(eq=False)
class Door:
    """Answers with its name; a turn on ``/slow`` waits until it is told to go on."""

    name: str
    refusing: bool = False
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.probes = Probes(Settings())

    @property
    def draining(self) -> bool:
        return self.probes.draining

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode(), "more_body": True})
        if scope["path"] == "/slow":
            await self.goes_on.wait()
        await send({"type": "http.response.body", "body": b" end", "more_body": False})


@dataclass(eq=False)
class Started:
    door: Door
    listener: Listener
    drain: Drain
    serving: "asyncio.Task[None]"


class Routers:
    """Routers of one port, in this process."""

    def __init__(self, application: str) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        self.application = application
        self.deleted = False
        self.started: list[Started] = []

    async def start(self, name: str, deployment: str, drain_s: float = 20.0) -> Started:
        door = Door(name)
        asked = (self.application, HOST, self.port, deployment)
        listener = Listener(*asked)
        taken = await asyncio.to_thread(listener.take)
        server = uvicorn.Server(
            uvicorn.Config(door, http=Connection, lifespan="off", log_level="warning")
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve(sockets=[taken]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        drain = Drain(door, server, listener.offer(), drain_s, self._is_deleted)  # type: ignore[arg-type]
        self.started.append(Started(door, listener, drain, serving))
        return self.started[-1]

    async def _is_deleted(self) -> bool:
        return self.deleted

    async def end(self, one: Started) -> None:
        await one.drain.run()
        await one.serving

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{HOST}:{self.port}", timeout=20, verify=False)


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Either of the event loops that Ray may run a router on."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def routers(request: pytest.FixtureRequest) -> AsyncIterator[Routers]:
    routers = Routers(request.node.name)
    yield routers
    routers.deleted = True
    for one in routers.started:
        one.door.goes_on.set()
        if not one.serving.done():
            await routers.end(one)


async def test_streams_go_on_and_no_connection_is_refused(routers: Routers) -> None:
    old = await routers.start("old", "1")
    async with routers.client() as client, client.stream("GET", "/slow") as running:
        text = running.aiter_text()
        assert await anext(text) == "old"
        new = await routers.start("new", "2")
        ending = asyncio.create_task(routers.end(old))
        for _ in range(200):
            async with routers.client() as other:
                assert (await other.get("/")).text in ("old end", "new end")
        await asyncio.sleep(0.6)
        async with routers.client() as other:
            assert (await other.get("/")).text == "new end"
        assert not ending.done()
        old.door.goes_on.set()
        assert [part async for part in text] == [" end"]
    await asyncio.wait_for(ending, 5)
    assert not new.door.draining


async def test_a_kept_connection_is_told_to_close(routers: Routers) -> None:
    old = await routers.start("old", "1")
    async with routers.client() as client:
        assert "connection" not in (await client.get("/")).headers
        await routers.start("new", "2")
        ending = asyncio.create_task(routers.end(old))
        await asyncio.sleep(0.3)
        # It may have been on its way before.
        last = await client.get("/")
        assert (last.text, last.headers["connection"]) == ("old end", "close")
        assert (await client.get("/")).text == "new end"
    await asyncio.wait_for(ending, 5)


async def test_a_router_without_a_successor_listens_on(routers: Routers) -> None:
    old = await routers.start("old", "1")
    ending = asyncio.create_task(routers.end(old))
    await asyncio.sleep(0.7)
    async with routers.client() as client:
        assert (await client.get("/")).text == "old end"
    # One of the same deployment may take over, as this one ends.
    await routers.start("new", "1")
    await asyncio.wait_for(ending, 5)
    async with routers.client() as client:
        assert (await client.get("/")).text == "new end"


async def test_no_successor_of_an_application_that_ends(routers: Routers) -> None:
    old = await routers.start("old", "1")
    routers.deleted = True
    async with routers.client() as client, client.stream("GET", "/slow") as running:
        text = running.aiter_text()
        assert await anext(text) == "old"
        ending = asyncio.create_task(routers.end(old))
        await asyncio.sleep(0.3)
        assert old.door.refusing
        assert not ending.done()
        old.door.goes_on.set()
        assert [part async for part in text] == [" end"]
    await asyncio.wait_for(ending, 5)


async def test_what_runs_is_cut_after_the_drains_time(routers: Routers) -> None:
    old = await routers.start("old", "1", drain_s=0.3)
    routers.deleted = True
    async with routers.client() as client, client.stream("GET", "/slow") as running:
        text = running.aiter_text()
        assert await anext(text) == "old"
        # The stream does not end by itself.
        await asyncio.wait_for(old.drain.run(), 5)
        old.door.goes_on.set()
    await asyncio.wait_for(old.serving, 5)


async def test_routers_of_one_deployment_have_a_socket_each(routers: Routers) -> None:
    first = await routers.start("first", "1")
    second = await routers.start("second", "1")
    assert not first.listener.taken
    third = await routers.start("third", "2")
    fourth = await routers.start("fourth", "2")
    assert first.listener.taken
    assert second.listener.taken
    for one in (third, fourth):
        assert one.listener.socket is not None
        assert one.listener.socket.getsockname() == (HOST, routers.port)


async def test_another_application_may_not_have_the_port(routers: Routers) -> None:
    await routers.start("old", "1")
    with pytest.raises(RuntimeError, match="Set another"):
        Listener("another application", HOST, routers.port, "1").take()


async def test_a_successor_that_dies_leaves_the_socket_to_the_next(routers: Routers) -> None:
    old = await routers.start("old", "1")
    lost = Listener(routers.application, HOST, routers.port, "2")
    await asyncio.to_thread(lost.take)
    assert old.listener.taken
    lost.close()
    await asyncio.sleep(0.1)
    assert not old.listener.taken


async def test_timeouts_that_change_in_place() -> None:
    settings = Settings(queue_timeout_s=7, idle_timeout_s=70)
    assert changed_timeouts({"queue_timeout_s": 5}, settings) == Timeouts(5.0, 70.0)
    assert changed_timeouts({"idle_timeout_s": "9"}, settings) == Timeouts(7.0, 9.0)
    for given, said in (
        ({"queue_timeout_s": 0}, "queue_timeout_s: "),
        ({"decoders": 2}, "only queue_timeout_s and idle_timeout_s change in place"),
        (["queue_timeout_s"], "give these by name"),
    ):
        with pytest.raises(SettingsError, match=said):
            changed_timeouts(given, settings)
