"""``kill -9`` of ConServe's processes, and harm to its disk, while clients send turns."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.acceptance.chaos.plan import PlannedKill, Victim
from tests.acceptance.chaos.tally import Tally
from tests.engines.client import engines
from tests.engines.processes import LMCACHE, processes

# Until an engine that was killed has been replaced, on a machine that is busy.
_WHOLE_S = 240.0
# How long its server is waited for to write, and how long a disk lacks its folder or its space.
_WRITES_S, _HARMED_S = 10.0, 20.0
_DECODERS = ("decoder", "engine core", "both decoders")
_PATTERNS: dict[Victim, str] = {
    "lmcache": LMCACHE,
    "table": "ray::TableActor",
    "router": "ray::ServeReplica:default:Router",
    "node": "ray::NodeService",
}


@dataclass
class Killer:
    """Carries out planned kills, one after the other.

    A decoder is killed only when all are there, so that one lives as a rule.

    Args:
        decoders: how many it has when it is whole.
        disk: the folder of its files of KV; None: it has none.
    """

    decoders: int
    tally: Tally
    disk: Path | None = None
    _harms: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def carry_out(self, kills: Sequence[PlannedKill], began_s: float, until_s: float) -> None:
        """Kill whoever is to be killed, when it is time; what is late by then is left out.

        Args:
            began_s: what the kills' times are counted from, by `time.monotonic`.
            until_s: nobody is killed later.
        """
        async with self._harms:
            for kill in kills:
                await asyncio.sleep(max(0.0, began_s + kill.at_s - time.monotonic()))
                if time.monotonic() > until_s:
                    break
                killed = await self._kill(kill, until_s)
                if killed is None:
                    self.tally.skipped[kill.victim] += 1
                else:
                    self.tally.kills[kill.victim] += 1
                    self.tally.say(f"killed: {kill.victim} ({killed})")

    async def _kill(self, kill: PlannedKill, until_s: float) -> str | None:
        """Returns who was killed, or None if there was nobody."""
        if kill.victim in _DECODERS:
            return await self._kill_decoder(kill, until_s)
        if kill.victim.startswith("disk"):
            return None if self.disk is None else self._harm(kill, self.disk)
        if kill.victim == "prefiller":
            pids = [engine["pid"] for engine in await _engines("prefiller")]
        else:
            found = await asyncio.to_thread(processes, _PATTERNS[kill.victim])
            pids = [process.pid for process in found]
        if not pids:
            return None
        if kill.victim == "lmcache" and self.disk is not None:
            await asyncio.to_thread(_wait_for_a_write, self.disk / "new")
        if kill.victim == "router":
            self.tally.router_killed_s = time.monotonic()
        return _killed(pids[int(kill.draw * len(pids))])

    def _harm(self, kill: PlannedKill, disk: Path) -> str | None:
        if not disk.is_dir():
            return None
        if kill.victim == "disk files":
            return _damage(disk, random.Random(kill.draw))
        harm = _without_folder if kill.victim == "disk folder" else _without_space
        self._harms.create_task(_for_a_while(harm(disk)))
        return f"for {_HARMED_S:g} s"

    async def _kill_decoder(self, kill: PlannedKill, until_s: float) -> str | None:
        whole = await self._whole(until_s)
        if whole is None:
            return None
        if kill.victim == "both decoders":
            since_s = time.monotonic()
            for one in whole:
                os.kill(one["pid"], signal.SIGKILL)
            # Until there is another one again, it has an end that nobody knows yet.
            self.tally.without_decoder.append((since_s, float("inf")))
            asyncio.get_running_loop().create_task(self._note_return(since_s, whole))
            return ", ".join(str(one["pid"]) for one in whole)
        one = whole[int(kill.draw * len(whole))]
        if kill.victim == "decoder":
            return _killed(one["pid"])
        cores = await asyncio.to_thread(processes, "EngineCore", one["pid"])
        return _killed(cores[0].pid) if cores else None

    async def _note_return(self, since_s: float, gone: list[dict[str, Any]]) -> None:
        ids = {one["id"] for one in gone}
        while True:
            found = await _engines("decoder")
            if found and any(one["id"] not in ids for one in found):
                self.tally.without_decoder.remove((since_s, float("inf")))
                self.tally.without_decoder.append((since_s, time.monotonic()))
                return
            await asyncio.sleep(0.5)

    async def _whole(self, until_s: float) -> list[dict[str, Any]] | None:
        """All decoders, once all have been there for a moment; None if that takes too long."""
        deadline_s = min(until_s, time.monotonic() + _WHOLE_S)
        while time.monotonic() < deadline_s:
            before = await _engines("decoder")
            # One that has just died is still listed.
            await asyncio.sleep(2)
            after = await _engines("decoder")
            if before and after and len(after) == self.decoders:
                answers = [await _healthy(one["url"]) for one in after]
                if all(answers) and {o["id"] for o in before} == {o["id"] for o in after}:
                    return after
        return None


async def _engines(role: str) -> list[dict[str, Any]]:
    """Engines alive; none while nobody can say."""
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
        return await asyncio.to_thread(engines, role)
    return []


async def _healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await asyncio.to_thread(httpx.get, url + "/health", timeout=10)).status_code == 200
    return False


def _killed(pid: int) -> str | None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return str(pid)


def _wait_for_a_write(new: Path) -> None:
    """Return as a file is written, or after a while."""
    began_s = time.time()
    while time.time() < began_s + _WRITES_S:
        with contextlib.suppress(OSError):
            if new.stat().st_mtime > began_s:
                return
        time.sleep(0.001)


async def _for_a_while(harm: contextlib.AbstractContextManager[None]) -> None:
    with harm:
        await asyncio.sleep(_HARMED_S)


@contextlib.contextmanager
def _without_folder(disk: Path) -> Iterator[None]:
    """Put a file where the folder was, so that it is not made again."""
    kept = disk.rename(disk.with_name("kept"))
    disk.touch()
    try:
        yield
    finally:
        disk.unlink()
        kept.rename(disk)


@contextlib.contextmanager
def _without_space(disk: Path) -> Iterator[None]:
    """Let writes beyond some bytes of a file fail, as on a disk that is full."""
    with contextlib.suppress(psutil.NoSuchProcess), contextlib.ExitStack() as after:
        for server in processes(LMCACHE):
            server.rlimit(psutil.RLIMIT_FSIZE, (8192, -1))
            after.callback(server.rlimit, psutil.RLIMIT_FSIZE, (-1, -1))
        yield


def _damage(disk: Path, rng: random.Random) -> str:
    """Truncate some files, and write something else into others; says how many."""
    files = sorted(f"{folder}/{name}" for folder, _, names in os.walk(disk) for name in names)
    chosen = [one for one in files if rng.random() < 0.3]
    for one in chosen:
        with contextlib.suppress(FileNotFoundError), open(one, "r+b") as file:
            at = file.seek(int(rng.random() * file.seek(0, os.SEEK_END)))
            if rng.random() < 0.5:
                file.truncate(at)
            else:
                file.write(rng.randbytes(16))
    return f"{len(chosen)} of {len(files)} damaged"
