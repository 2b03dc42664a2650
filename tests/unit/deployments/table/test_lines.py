"""What the log has of turns, conversations and engines, and what it never has."""

import contextlib
import io
import json
import logging
import time
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from conserve import identity
from conserve.turn import TurnKey, TurnStats
from deployments.table import lines
from deployments.table.lines import Format
from tests.unit.deployments.table.test_table import TOKENS, a_full_service, a_service

TURN = TurnKey(identity.scoped("acme", "a b\nc"), 1, 7)
WHOLE = TurnStats(
    100, 5, 30, 64, outcome="completed", latency_s=1.23456, ttft_s=0.5, tbt_s=(0.1,), continued=1,
    tenant="acme", request_id="req-1", decoder_id="d1", prefiller_id="p1", placement="new",
    phases={"wait": 0.25, "decode": 0.125},
)  # fmt: skip


@contextlib.contextmanager
def logged(format_: Format, path: Path) -> Iterator[Path]:
    lines.log_to(path, format_)
    root = logging.getLogger("conserve")
    yield path
    for handler in list(root.handlers):
        if type(handler) in (logging.StreamHandler, RotatingFileHandler):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(logging.NOTSET)
    root.propagate = True


@pytest.fixture(params=["json", "text"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The log's file, in each format."""
    with logged(request.param, tmp_path / "logs" / "conserve.log") as path:
        yield path


def told(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_turns_line_tells_whose_it_was_and_what_it_took() -> None:
    assert lines.turn_fields(TURN, WHOLE) == {
        "request_id": "req-1",
        "conversation": "a b\nc",
        "tenant": "acme",
        "turn": 7,
        "outcome": "completed",
        "engine": "d1",
        "prefiller": "p1",
        "placement": "new",
        "latency_s": 1.2346,
        "ttft_s": 0.5,
        "wait_s": 0.25,
        "decode_s": 0.125,
        "continued": 1,
        "prompt_tokens": 100,
        "cached_tokens": 30,
        "loaded_tokens": 64,
        "output_tokens": 5,
    }
    refused = TurnStats(outcome="refused", latency_s=0.001, tenant="acme", error="prompt_too_long")
    assert lines.turn_fields(None, refused) == {
        "outcome": "refused", "error": "prompt_too_long", "latency_s": 0.001, "tenant": "acme",
    }  # fmt: skip


async def test_there_is_a_line_for_each_turn_and_for_what_befalls_conversations_and_engines(
    log: Path, request: pytest.FixtureRequest
) -> None:
    stderr = io.StringIO()
    for handler in logging.getLogger("conserve").handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(stderr)
    service = await a_full_service()
    await service.release("full")
    plan = await service.placed(tokens=TOKENS)
    assert plan.reason == "new"
    await service.prefilled(plan, TurnStats(prefilled_tokens=TOKENS, prefiller_lmcache_tokens=100))
    await service.ends(plan, TurnStats(TOKENS, 5, 0, 512), (b"c" * 16,))
    await service.observe(
        plan.turn, TurnStats(outcome="completed", latency_s=1.5, ttft_s=0.5, request_id="r-1")
    )
    assert (await service.later()).reason == "home"
    await service.engine_lost("decoder#1", "as it happens")
    written = log.read_text().splitlines()  # noqa: ASYNC240
    if "json" in request.node.name:
        found = told(log)
        events = [one["event"] for one in found]
        turn = found[events.index("turn")]
        assert (turn["request_id"], turn["conversation"], turn["level"]) == ("r-1", "c", "INFO")
        placed = found[events.index("place")]
        assert (placed["conversation"], placed["decoder"]) == ("full", "decoder#1")
        lost = found[-1]
        assert (lost["engine"], lost["why"]) == ("decoder#1", "as it happens")
        assert lost["level"] == "WARNING"
    else:
        events = [line.split()[2] for line in written]
        assert written[-1].endswith('role=decoder why="as it happens" unbound=1')
    assert events == [
        "engine_ready", "engine_ready", "place", "ended", "place", "turn", "cut", "engine_lost",
    ]  # fmt: skip
    # What is in Ray's log, too, and through it in the application's.
    assert stderr.getvalue().splitlines() == [line for line in written if "engine_" in line]


@pytest.mark.parametrize("first", ["router", "decoder"])
async def test_a_slow_turns_line_says_why_whoever_reports_its_end_first(
    tmp_path: Path, first: str
) -> None:
    with logged("json", tmp_path / "conserve.log") as log:
        service = await a_service()
        plan = await service.turn("c", TOKENS)
        seen = TurnStats(outcome="completed", latency_s=1.5, ttft_s=0.5, request_id="r-1")
        stats = TurnStats(TOKENS, 5, 0, 0, engine_wait_s=0.8, engine_wait_for="step")
        if first == "router":
            await service.observe(plan.turn, seen)
        await service.ends(plan, stats)
        if first == "decoder":
            await service.observe(plan.turn, seen)
        turns = [one for one in told(log) if one["event"] == "turn"]
        assert [one.get("why") for one in turns] == ["waited 0.8 s for other calls of its engine"]

        # Its decoder never reports the next one's end.
        later = await service.later()
        await service.observe(
            later.turn, TurnStats(outcome="completed", latency_s=1.5, ttft_s=0.5, request_id="r-2")
        )
        await service._tidy(time.monotonic())
        assert told(log)[-1].get("request_id") != "r-2"
        await service._tidy(time.monotonic() + 6.0)
        assert (told(log)[-1]["request_id"], "why" in told(log)[-1]) == ("r-2", False)


def test_a_line_stays_one_whatever_a_client_calls_its_conversation(log: Path) -> None:
    lines.log_turn(TURN, WHOLE)
    (line,) = log.read_text().splitlines()
    assert r"a b\nc" in line


def test_the_log_is_bounded(log: Path) -> None:
    (handler,) = (
        one
        for one in logging.getLogger("conserve").handlers
        if isinstance(one, RotatingFileHandler)
    )
    handler.maxBytes = 2000
    for _ in range(100):
        lines.log_turn(TURN, WHOLE)
    files = sorted(log.parent.iterdir())
    assert len(files) == 1 + handler.backupCount
    assert all(file.stat().st_size <= handler.maxBytes for file in files)
