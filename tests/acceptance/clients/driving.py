"""Driving a client against the application, and what has to be seen of it afterwards."""

import asyncio
import itertools
import json
import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.acceptance.clients.clients import Client, Place
from tests.acceptance.clients.recorder import Exchange, Recorder
from tests.acceptance.clients.scripts import MARKER_FILE, SCRIPTS, WRITTEN
from tests.engines.applications import URL
from tests.engines.metrics import exposed, metric

logger = logging.getLogger(__name__)

# A program that starts for the first time on a slow machine, and its prompts of 20k tokens.
_LONGEST_S = 600.0
# KV is found by whole blocks, and where an answer begins its tokens may be cut otherwise.
TWO_BLOCKS = 256

# Names of headers and fields that may tell conversations apart.
_ID = re.compile(
    "session|thread|conversation|affinity|cache_key|user_id|window-id|agent-id|routing|program"
    "|client-request-id|previous_response"
)
# What is said, and not about whom.
_CONTENT = ("messages", "input", "tools", "system", "instructions")


class Counts(NamedTuple):
    """Counters of `/metrics`, or what was added to them."""

    handoffs: float
    moves: float
    failures: float
    later_prefills: float
    computed_tokens: float

    @classmethod
    def now(cls) -> "Counts":
        text = exposed(URL)
        found = metric("conserve_decoder_cached_tokens_total", text)
        found += metric("conserve_handoff_tokens_total", text)
        return cls(
            metric("conserve_handoffs_total", text),
            metric("conserve_moves_total", text),
            metric("conserve_cold_prefill_failures_total", text),
            metric("conserve_later_prefills_total", text),
            metric("conserve_prompt_tokens_total", text) - found,
        )

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True)
class Drive:
    """A client's run.

    Attributes:
        turns: the task's, in order.
        asides: other requests for answers.
        counts: what the run has added to the application's counters.
    """

    client: Client
    turns: Sequence[Exchange]
    asides: Sequence[Exchange]
    counts: Counts


async def drive(client: Client, application: str, folder: Path, run: str) -> Drive:
    """Have a client do its task, and fail unless it is done and nothing else was reached for.

    Args:
        folder: an empty one.
        run: tells this run's prompts from others'.
    """
    before = Counts.now()
    async with Recorder(application) as recorder:
        place = Place(recorder.url, folder / "home", folder / "work", run)
        await work(client, place)
    assert not recorder.outside
    asked = [one for one in recorder.exchanges if one.path == client.api]
    failed = [(one.path, one.status, one.answer) for one in recorder.exchanges if one.status != 200]
    assert not failed
    belongs = SCRIPTS[client.script].belongs
    turns = [one for one in asked if belongs in json.dumps(one.body)]
    asides = [one for one in asked if one not in turns]
    for one in asked:
        kind = "turn" if one in turns else "aside"
        logger.info("%s %s: %s, %s", client.name, client.version, kind, one.usage)
    return Drive(client, turns, asides, Counts.now().since(before))


async def work(client: Client, place: Place) -> None:
    """Run a client's process to its end; fails unless that is well and its marker is there."""
    place.home.mkdir()
    place.work.mkdir()
    process = await asyncio.create_subprocess_exec(
        *client.command(place),
        cwd=place.work,
        env=client.all_environment(place),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), _LONGEST_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode == 0, printed.decode(errors="replace")
    marker = place.work / MARKER_FILE
    assert marker.exists(), printed.decode(errors="replace")
    assert marker.read_text() == WRITTEN


def _require_ids(drive: Drive) -> None:
    """Every request names its conversation by the client's ids, always the same, and no others."""
    values: dict[str, set[str]] = {}
    for exchange in (*drive.turns, *drive.asides):
        sent = dict(ids_sent(exchange))
        assert set(sent) == drive.client.ids
        for name, value in sent.items():
            values.setdefault(name, set()).add(value)
    assert all(len(seen) == 1 for seen in values.values()), values


def ids_sent(exchange: Exchange) -> Iterator[tuple[str, str]]:
    """The headers and the fields of the body, dotted, whose names may be those of ids."""
    body = {key: value for key, value in exchange.body.items() if key not in _CONTENT}
    for name, value in (*exchange.headers.items(), *_fields(body)):
        if _ID.search(name.lower()):
            yield name, value


def _fields(body: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in body.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{above}{key}.")
        elif isinstance(value, str):
            yield above + key, value


def require_served(drive: Drive) -> None:
    """Ids as they are sent, one handoff a history, and later turns found where they ran."""
    _require_ids(drive)
    listed = httpx.get(URL + "/v1/conversations", timeout=30).json()["data"]
    assert sum(one["turns"] for one in listed) == len(drive.turns) + len(drive.asides)
    client, turns, asides, counts = drive.client, drive.turns, drive.asides, drive.counts
    assert len(turns) == len(SCRIPTS[client.script].steps) >= 3
    assert len(asides) == client.asides
    for first in (turns[0], *asides):
        assert first.usage.prompt_tokens - first.found_tokens <= TWO_BLOCKS, first.turn
        # Its client is told what no engine had to compute.
        assert first.usage.cached_tokens <= first.found_tokens
    assert (counts.moves, counts.failures, counts.later_prefills) == (0, 0, 0)
    # What answers say and what the router counts is the same.
    every = (*turns, *asides)
    assert counts.computed_tokens == sum(
        one.usage.prompt_tokens - one.found_tokens for one in every
    )
    if client.appends:
        assert all(one.usage.cached_tokens == one.found_tokens for one in turns[1:])
        _require_appended(drive)


def _require_appended(drive: Drive) -> None:
    """Each turn goes on with the one before it, on the same decoder."""
    turns = drive.turns
    assert drive.counts.handoffs == 1 + len(drive.asides)
    assert len({one.decoder for one in turns}) == 1
    assert len({one.conversation for one in turns}) == 1
    for before, turn in itertools.pairwise(turns):
        held = before.usage.prompt_tokens + before.usage.output_tokens
        assert turn.usage.cached_tokens >= held - TWO_BLOCKS, (before.usage, turn.usage)
        if not drive.asides:
            # Nothing came from LMCache again.
            assert turn.turn is not None
            assert turn.turn["lmcache_tokens"] == 0
