"""Measures what an open dashboard costs the conversation table, with many live conversations.

The table is the real actor, and the router its own interface, by HTTP. Stand-ins for decoders
have a turn of each conversation now and then: they report it as decoders do, and its router
observes it. Pages are clients that send the dashboard's own requests, at its own pace: one for
events, and one for engines every few seconds. Rounds with and without them alternate at random, and
the CPU time of the table's process is read before and after each.
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
import socket
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import ray
import uvicorn

from conserve.direct import Began, Ended, Report
from conserve.events import KINDS
from conserve.history import History, TurnKey, TurnStats
from conserve.settings import Settings
from conserve.wire import BEAT_S
from deployments.messages import EngineInfo, TurnTiming
from deployments.router import dashboard
from deployments.router.frontdoor import FrontDoor
from deployments.table.table_client import TableClient
from experiments.harness import Experiment, at_least_1, group, median_interval, rounds

_PORT = 8196
_URL = f"http://127.0.0.1:{_PORT}"
_DECODERS = 8
_TOKENS = 8000
_TURN_S = 2.0
_REPORT_S = 0.1
_SETTLE_S = 2.0
_TARGET = 0.01


class Decoders:
    """Stand-ins for decoders, which have turns of all their conversations.

    Attributes:
        turns: how many have ended.
    """

    def __init__(self, table: TableClient, conversations: int, gap_s: float) -> None:
        self._table = table
        self._gap_s = gap_s
        self._by: dict[str, list[History]] = {f"decoder{n}": [] for n in range(_DECODERS)}
        ids = itertools.cycle(self._by)
        now_s = time.time()
        for number in range(conversations):
            id_ = next(ids)
            history = History(
                f"agent-{number:05}", number + 1, now_s, now_s, id_, _TOKENS, turns=1, finished=256
            )
            history.set_tails((os.urandom(16),), TurnStats(_TOKENS - 100, 100, 0, _TOKENS - 200))
            self._by[id_].append(history)
        self._heard = dict.fromkeys(self._by, 0)
        self.turns = 0

    async def register(self) -> None:
        for id_, holds in self._by.items():
            room = 2 * _TOKENS * len(holds)
            engine = EngineInfo(id_, "decoder", f"http://{id_}", 1, room, 32768, holds)
            await self._table.register(replace(engine, registration=1))
        await self._table.register(EngineInfo("prefiller", "prefiller", "http://p", 1, 1, 32768))

    async def run(self) -> None:
        parts = [one for id_ in self._by for one in (self._beat(id_), self._hear(id_))]
        await asyncio.gather(self._route(), *parts, *(self._report(id_) for id_ in self._by))

    async def _route(self) -> None:
        while True:
            await self._table.router_beat("router")
            await self._table.beat("prefiller", None, None)
            await asyncio.sleep(BEAT_S)

    async def _beat(self, id_: str) -> None:
        while True:
            await self._table.beat(id_, None, None)
            await asyncio.sleep(BEAT_S)

    async def _hear(self, id_: str) -> None:
        while True:
            notice = await self._table.hear(id_, 1, self._heard[id_])
            if notice is not None:
                self._heard[id_] = notice.number

    async def _report(self, id_: str) -> None:
        histories = self._by[id_]
        order = random.Random(id_)
        running: deque[tuple[float, TurnKey]] = deque()
        turn_ids = {one.id: 256 for one in histories}
        due = 0.0
        told_heard = 0
        last_s = time.monotonic()
        number = 0
        while True:
            began_s = time.monotonic()
            due += (began_s - last_s) * len(histories) / self._gap_s
            last_s = began_s
            events: list[Began | Ended] = []
            ended = []
            while running and running[0][0] <= began_s:
                turn = running.popleft()[1]
                stats = TurnStats(_TOKENS - 100, 100, _TOKENS - 300, 0, "bash", decode_s=1.8)
                events.append(Ended(turn, stats, (os.urandom(16),), True))
                ended.append(turn)
            while due >= 1:
                due -= 1
                history = order.choice(histories)
                if turn_ids[history.id] % 256 == 255:
                    continue
                turn_ids[history.id] += 1
                turn = TurnKey(history.id, history.incarnation, turn_ids[history.id])
                events.append(Began(turn, "router"))
                running.append((began_s + _TURN_S, turn))
            heard = self._heard[id_]
            if events or heard > told_heard:
                number += 1
                await self._table.report(id_, 1, Report(number, tuple(events), heard))
                told_heard = heard
            for turn in ended:
                self._table.observe(TurnTiming("completed", _TURN_S, 0.15, (0.02,) * 99, turn))
            self.turns += len(ended)
            await asyncio.sleep(max(0.01, began_s + _REPORT_S - time.monotonic()))


class Page:
    """A client that asks for what the dashboard does.

    Attributes:
        events: how many it was told.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        script = Path(dashboard.__file__).with_name("page") / "page.js"
        (every_ms,) = re.findall(r"ENGINES_MS = (\d+)", script.read_text())
        self._every_s = int(every_ms) / 1000
        kinds = [kind for kind in KINDS if kind != "environment"]
        self._query = "&".join(f"kind={kind}" for kind in kinds)
        self.events = 0

    async def open(self) -> None:
        for path in ("/v1/engines", "/v1/engines", "/v1/conversations?limit=1000"):
            (await self._client.get(_URL + path)).raise_for_status()

    async def listen(self, after: str | None = None) -> None:
        headers = {} if after is None else {"Last-Event-ID": after}
        url = f"{_URL}/v1/events?{self._query}"
        async with self._client.stream("GET", url, headers=headers) as answer:
            async for part in answer.aiter_bytes():
                self.events += part.count(b"\nevent: ")

    async def poll(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            (await self._client.get(_URL + "/v1/engines")).raise_for_status()


@contextlib.asynccontextmanager
async def opened(client: httpx.AsyncClient, count: int) -> AsyncIterator[list[Page]]:
    """Have pages open for the time of a ``with`` block."""
    pages = [Page(client) for _ in range(count)]
    tasks = [asyncio.create_task(run()) for page in pages for run in (page.listen, page.poll)]
    try:
        yield pages
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def table_process() -> psutil.Process:
    """Return the table's process."""
    (found,) = (
        one for one in psutil.Process().children(recursive=True)
        if "TableActor" in " ".join(one.cmdline())
    )  # fmt: skip
    return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(experiment: Experiment) -> None:
    options = experiment.options
    settings = Settings(decoders={"replicas": _DECODERS})  # type: ignore[arg-type]
    table = TableClient("dashboard", "1", settings)
    decoders = Decoders(table, options.conversations, options.gap)
    await decoders.register()
    running = asyncio.create_task(decoders.run())
    door = FrontDoor(settings, table, "router")
    server = uvicorn.Server(uvicorn.Config(door, log_level="warning", lifespan="off"))
    # It takes connections from here on, and answers them once it serves.
    listener = socket.create_server(("127.0.0.1", _PORT))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    process = table_process()
    found: list[tuple[int, str, float, float, float]] = []
    counts = {f"{count} pages": count for count in options.pages}
    async with httpx.AsyncClient(timeout=60) as client:
        order = rounds(["none", *counts], options.rounds, options.seed, warm_up=1)
        for number, name in order:
            assert not running.done(), running.exception()
            async with opened(client, counts.get(name, 0)) as pages:
                await asyncio.sleep(_SETTLE_S)
                began_s, began_cpu_s, turns = time.monotonic(), _cpu_s(process), decoders.turns
                heard = sum(page.events for page in pages)
                await asyncio.sleep(options.seconds)
                wall_s = time.monotonic() - began_s
                cpu = (_cpu_s(process) - began_cpu_s) / wall_s
                told = (sum(page.events for page in pages) - heard) / max(1, len(pages)) / wall_s
                if number >= 0:
                    found.append((number, name, cpu, (decoders.turns - turns) / wall_s, told))
        opening = []
        for _ in range(options.rounds):
            quiet = await _busy_s(process, asyncio.sleep(1.0))
            page = Page(client)
            listening = asyncio.create_task(page.listen("0"))
            opening.append(await _busy_s(process, page.open(), 1.0) - quiet)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
    running.cancel()
    server.should_exit = True
    await asyncio.gather(running, serving, return_exceptions=True)
    _show(experiment, found, statistics.median(opening))


async def _busy_s(process: psutil.Process, asked: object, rest_s: float = 0.0) -> float:
    """Return the CPU seconds that the table took meanwhile, and shortly after."""
    began = _cpu_s(process)
    await asked  # type: ignore[misc]
    await asyncio.sleep(rest_s)
    return _cpu_s(process) - began


def _show(
    experiment: Experiment, found: list[tuple[int, str, float, float, float]], opening_s: float
) -> None:
    by = group(found, lambda one: one[1])
    base = {number: cpu for number, _, cpu, *_ in by["none"]}
    rows, saved = [], {}
    for name, ones in by.items():
        median, low, high = median_interval([one[2] - base[one[0]] for one in ones])
        turns = statistics.median(one[3] for one in ones)
        told = statistics.median(one[4] for one in ones)
        cpu = statistics.median(one[2] for one in ones)
        more = "" if name == "none" else f"{median:.2%}"
        interval = "" if name == "none" else f"{low:.2%} to {high:.2%}"
        rows.append([name, f"{turns:.0f}", f"{told:.0f}", f"{cpu:.2%}", more, interval])
        saved[name] = {"cpu": cpu, "more": [median, low, high], "turns_per_s": turns}
    heads = ("open", "turns/s", "events/s told", "CPU of the table", "more", "95 %")
    options = experiment.options
    experiment.show(
        f"The table's CPU time, in shares of a core: {options.conversations:,} conversations",
        heads, rows, caption=f"opening a page: {opening_s * 1000:.0f} ms once",
    )  # fmt: skip
    experiment.save({**saved, "opening_s": opening_s})


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("dashboard", __doc__, rounds=7, seed=1)
    experiment.option("--conversations", 10_000, "live ones", type=at_least_1)
    experiment.option("--gap", 60.0, "seconds between the turns of one")
    experiment.option("--pages", [1, 4], "open at a time")
    experiment.option("--seconds", 15.0, "of each round")
    experiment.parse(arguments)
    ray.init(
        num_cpus=2, namespace="serve", include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    try:
        asyncio.run(measure(experiment))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
