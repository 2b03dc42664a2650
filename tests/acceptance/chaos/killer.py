"""``kill -9`` of ConServe's processes while clients are at work."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tests.acceptance.chaos.plan import PlannedKill, Victim
from tests.acceptance.chaos.tally import Tally
from tests.engines.processes import processes

# Until an engine that was killed has been replaced, on a machine that is busy.
_WHOLE_S = 240.0
_DECODERS = ("decoder", "engine core", "both decoders")
_PATTERNS: dict[Victim, str] = {
    "lmcache": r"deployments\.node\.lmcache_main server",
    "table": "ray::TableActor",
    "router": "ray::ServeReplica:default:Router",
    "node": "ray::NodeService",
}


class Killer:
    """Carries out planned kills, one after the other.

    A decoder is killed only when all are there, so that one lives as a rule.

    Args:
        url: the application's.
        decoders: how many it has when it is whole.
    """

    def __init__(self, url: str, decoders: int, tally: Tally) -> None:
        self._url = url
        self._decoders = decoders
        self._tally = tally

    async def carry_out(self, kills: Sequence[PlannedKill], began_s: float, until_s: float) -> None:
        """Kill whoever is to be killed, when it is time; what is late by then is left out.

        Args:
            began_s: what the kills' times are counted from, by `time.monotonic`.
            until_s: nobody is killed later.
        """
        for kill in kills:
            await asyncio.sleep(max(0.0, began_s + kill.at_s - time.monotonic()))
            if time.monotonic() > until_s:
                break
            killed = await self._kill(kill, until_s)
            if killed is None:
                self._tally.skipped[kill.victim] += 1
            else:
                self._tally.kills[kill.victim] += 1
                self._tally.say(f"killed: {kill.victim} ({killed})")

    async def _kill(self, kill: PlannedKill, until_s: float) -> str | None:
        """Returns who was killed, or None if there was nobody."""
        if kill.victim in _DECODERS:
            return await self._kill_decoder(kill, until_s)
        if kill.victim == "prefiller":
            pids = [engine["pid"] for engine in await self._engines("prefiller") or []]
        else:
            found = await asyncio.to_thread(processes, _PATTERNS[kill.victim])
            pids = [process.pid for process in found]
        if not pids:
            return None
        if kill.victim == "router":
            self._tally.router_killed_s = time.monotonic()
        return _killed(pids[int(kill.draw * len(pids))])

    async def _kill_decoder(self, kill: PlannedKill, until_s: float) -> str | None:
        whole = await self._whole(until_s)
        if whole is None:
            return None
        if kill.victim == "both decoders":
            since_s = time.monotonic()
            for one in whole:
                os.kill(one["pid"], signal.SIGKILL)
            # Until there is another one again, it has an end that nobody knows yet.
            self._tally.without_decoder.append((since_s, float("inf")))
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
            found = await self._engines("decoder")
            if found and any(one["id"] not in ids for one in found):
                self._tally.without_decoder.remove((since_s, float("inf")))
                self._tally.without_decoder.append((since_s, time.monotonic()))
                return
            await asyncio.sleep(0.5)

    async def _whole(self, until_s: float) -> list[dict[str, Any]] | None:
        """All decoders, once all have been there for a moment; None if that takes too long."""
        deadline_s = min(until_s, time.monotonic() + _WHOLE_S)
        while time.monotonic() < deadline_s:
            before = await self._engines("decoder")
            # One that has just died is still listed.
            await asyncio.sleep(2)
            after = await self._engines("decoder")
            if before and after and len(after) == self._decoders:
                answers = [await self._healthy(one["url"]) for one in after]
                if all(answers) and {o["id"] for o in before} == {o["id"] for o in after}:
                    return after
        return None

    async def _healthy(self, url: str) -> bool:
        try:
            async with httpx.AsyncClient(timeout=10) as client:
                return (await client.get(url + "/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def _engines(self, role: str) -> list[dict[str, Any]] | None:
        """Engines alive; None while nobody can say."""
        try:
            async with httpx.AsyncClient(timeout=20) as client:
                response = await client.get(self._url + "/v1/engines")
        except httpx.TransportError:
            return None
        if response.status_code != 200:
            return None
        return [one for one in response.json()["data"] if one["role"] == role]


def _killed(pid: int) -> str | None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return str(pid)
