"""Engines that do both, told of late; and that the paper's placement decides as ever."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from conserve.placement import EngineLoad
from conserve_lab.records import TurnRecord
from conserve_lab.simulate import Cluster, System
from conserve_lab.simulate.engine import EngineTurn, SimulatedEngine
from tests.unit.conserve_lab.simulate.scenes import COSTS as ROOMY
from tests.unit.conserve_lab.simulate.scenes import drawn

COSTS = replace(ROOMY, capacity_tokens=60_000, idle_w=None, prefill_w=None, decode_w=None)


def _run(placement: Any, decoders: int = 1, **more: Any) -> tuple[Cluster, list[TurnRecord]]:
    records: list[TurnRecord] = []
    prefillers = (COSTS,) * more.pop("prefillers", 1)
    system = System("s", placement, prefillers, (COSTS,) * decoders, **more)
    cluster = Cluster(system, records.extend)
    cluster.run(drawn())
    return cluster, records


@pytest.mark.parametrize("more", [{}, {"pausing": True, "host_tokens": 120_000}])
def test_prefillers_host_and_every_turn_ends_once(more: dict[str, Any]) -> None:
    cluster, records = _run("elastic", queue_timeout_s=600.0, **more)
    servers = Counter(one.server for one in records if one.outcome == "completed")
    assert set(servers) == {"decoder-0", "prefiller-0"}
    ended = {(one.conversation, one.turn) for one in records}
    assert len(ended) == len(records) == cluster.turns
    assert all(one.outcome == "completed" for one in records)
    # Who lives on a prefiller, stays there, unless it was paused meanwhile.
    if not more:
        assert all(
            len({one.server for one in records if one.conversation == name}) == 1
            for name in {one.conversation for one in records}
        )
        # Running turns have room to grow.
        assert sum(one.preemptions for one in cluster.decoders.values()) == 0
    handoffs = cluster.figures(1.0).handoffs
    assert handoffs is not None
    if more:
        # With host memory a turn runs where it costs least, and takes its history there.
        assert handoffs == 0
        assert cluster.table.memory is not None
        assert cluster.table.memory.pauses["load"] > 0
    else:
        # Some prompts were sent to the prefiller.
        assert 0 < handoffs < 60
    table = cluster.table
    assert {one.held_tokens for one in table.decoders.values()} == {0}
    assert {one.queued_tokens for one in table.prefillers.values()} == {0}
    assert all(table.loads.work(id, 1e9).backlog_s == 0 for id in table.decoders)  # type: ignore[union-attr]


def test_an_engine_says_what_it_does() -> None:
    events: list[tuple[float, int]] = []
    engine = SimulatedEngine(
        "e", COSTS, lambda at_s, _, version: events.append((at_s, version)), lambda *_: None
    )
    assert engine.load == EngineLoad(step_s=COSTS.step_s)
    engine.submit(EngineTurn("a", 3_000, 10), 0.0)
    # Of the first chunk the step is under way.
    assert engine.load.prefill_tokens == 3_000 - COSTS.batched_tokens
    engine.submit(EngineTurn("b", 500, 10, loaded_tokens=256), 0.0)
    assert engine.load.prefill_tokens == 3_000 - COSTS.batched_tokens + 244
    while engine.load.decodes < 2:
        at_s, version = events.pop()
        engine.wake(at_s, version)
    # The second's first token comes a step after the other's, or in the same.
    load = engine.load
    assert load.prefill_tokens == 0
    assert load.step_s > COSTS.step_s + 2 * COSTS.per_sequence_s
