"""Rivals at work on simulated engines."""

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest

from autoscale.capacity.profile import load_profile
from conserve_lab.records import TurnRecord
from conserve_lab.simulate import Cluster, System
from conserve_lab.simulate.fleet import Fleet
from conserve_lab.simulate.rivals import RivalName
from conserve_lab.simulate.run import EngineCounts, make_cluster, make_system
from tests.unit.conserve_lab.simulate.scenes import COSTS, Scripted, drawn

_RIVALS: tuple[RivalName, ...] = get_args(RivalName)
_TIGHT = replace(COSTS, capacity_tokens=60_000)


def _system(rival: RivalName, costs: Any = COSTS, engines: int = 3, **more: Any) -> System:
    fields: dict[str, Any] = {"keeps_ended": True} | more
    return System(rival, "collocated", (), (costs,) * engines, rival=rival, **fields)


def _run(system: System, plan: Any) -> tuple[Fleet, list[TurnRecord]]:
    records: list[TurnRecord] = []
    fleet = Fleet(system, records.extend)
    fleet.run(plan)
    return fleet, records


@pytest.mark.parametrize("rival", _RIVALS)
def test_every_turn_ends_once_however_little_room_there_is(rival: RivalName) -> None:
    workload = drawn(40, rate_per_s=4.0)
    fleet, records = _run(_system(rival, _TIGHT), workload)
    assert len(records) == workload.counts["turns"] == fleet.turns
    assert set(Counter((one.conversation, one.turn) for one in records).values()) == {1}
    assert {one.outcome for one in records} == {"completed"}
    assert all(one.sent_s < (one.first_token_s or 0) <= one.ended_s for one in records)
    for engine in fleet.decoders.values():
        assert engine.turns == engine.active_tokens == 0
        # Nobody has told it that they have ended.
        assert engine.idle_tokens > 0


def test_one_engine_with_room_for_all_is_a_collocated_one_whoever_uses_it() -> None:
    """Two ways through the simulator agree to the last digit."""
    roomy = replace(COSTS, capacity_tokens=10**7)
    records: list[TurnRecord] = []
    Cluster(System("x", "collocated", (), (roomy,)), records.extend).run(drawn(20))
    for rival in ("vllm", "affinity"):
        _, found = _run(_system(rival, roomy, engines=1), drawn(20))
        assert [
            replace(one, system="x", server="decoder-0") for one in found
        ] == records  # fmt: skip


def test_only_without_affinity_do_turns_find_nothing_of_their_own() -> None:
    def servers(rival: RivalName) -> tuple[int, float]:
        _, records = _run(_system(rival), drawn(30))
        by: dict[str, set[str | None]] = {}
        for one in records:
            by.setdefault(one.conversation, set()).add(one.server)
        later = [one for one in records if one.turn > 1]
        found = sum(one.cached_tokens or 0 for one in later)
        return max(map(len, by.values())), found / sum(one.reused_tokens or 0 for one in later)

    assert servers("affinity") == (1, pytest.approx(1.0, abs=0.01))
    most, share = servers("vllm")
    assert most > 1
    assert share < 0.9


def test_host_memory_has_what_engines_have_dropped_or_never_had() -> None:
    def shares(rival: RivalName, host_tokens: int) -> float:
        system = _system(rival, _TIGHT, host_tokens=host_tokens)
        fleet, records = _run(system, drawn(40, rate_per_s=4.0))
        computed = sum(engine.computed_tokens for engine in fleet.decoders.values())
        later = [one for one in records if one.turn > 1]
        found = sum(min(one.reused_tokens or 0, one.cached_tokens or 0) for one in later)
        prompts = sum(one.prompt_tokens for one in records)
        # What was loaded was found, and not computed; a preempted turn is computed twice.
        cached = sum(one.cached_tokens or 0 for one in records)
        assert computed == pytest.approx(prompts - cached, rel=0.1)
        return found / sum(one.reused_tokens or 0 for one in later)

    for rival in ("affinity", "vllm"):
        without, scarce, ample = (shares(rival, tokens) for tokens in (0, 100_000, 10**7))
        assert without < scarce < ample
        # Chunks are whole, so of each history a bit is missing.
        assert ample > 0.9


def test_where_histories_do_not_fit_thunderagent_finds_what_affinity_computes_again() -> None:
    def found(rival: RivalName) -> float:
        records: list[TurnRecord] = []
        fleet = Fleet(
            _system(rival, replace(COSTS, capacity_tokens=100_000), decay=1.0), records.extend
        )
        fleet.run_programs(drawn(400), 30, until_s=600.0)
        later = [one for one in records if one.turn > 1]
        hits = sum(min(one.cached_tokens or 0, one.reused_tokens or 0) for one in later)
        return hits / sum(one.reused_tokens or 0 for one in later)

    assert found("thunderagent") > 0.8 > 0.5 > found("affinity")


def test_kept_for_longer_more_is_found() -> None:
    def found(ttl_s: float) -> int:
        _, records = _run(_system("ttl", _TIGHT, ttl_s=ttl_s), drawn(40, rate_per_s=4.0))
        return sum(one.cached_tokens or 0 for one in records)

    assert found(0.0) < found(10.0)


def test_who_has_had_little_overtakes_who_has_had_much() -> None:
    """One with 20 s behind it waits for room; a new one comes after it, and goes first."""
    small = replace(COSTS, capacity_tokens=12_000)
    plan = [
        (0.0, Scripted([(2_000, 0, 2_000, 0.0), (5_000, 4_000, 10, 2.0)], "old")),
        (18.0, Scripted([(8_000, 0, 1_500, 0.0)], "runs")),
        (25.0, Scripted([(5_000, 0, 10, 0.0)], "new")),
    ]

    def order(rival: RivalName) -> list[str]:
        fresh = [(at_s, replace(script, at=0)) for at_s, script in plan]
        _, records = _run(_system(rival, small, engines=1), fresh)
        return [
            one.conversation
            for one in sorted(records, key=lambda one: one.ended_s)
            if (one.conversation, one.turn) in {("old", 2), ("new", 1)}
        ]

    assert order("affinity") == ["old", "new"]
    assert order("attained") == ["new", "old"]


# --- Closed loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["affinity", "thunderagent", "conserve", "parking"])
def test_in_a_closed_loop_so_many_are_under_way_until_time_is_up(name: str) -> None:
    system = make_system(name, load_profile("h100-qwen3-8b"), EngineCounts(1, 1))
    records: list[list[TurnRecord]] = []
    cluster = make_cluster(system, records.append)
    cluster.run_programs(drawn(10_000), 7, until_s=300.0, ramp_s=7.0)
    assert cluster.ended_s == 300.0
    assert len({turns[0].conversation for turns in records}) == len(records)
    assert all(one.ended_s <= 300.0 for turns in records for one in turns)
    over = [turns for turns in records if turns[-1].last]
    assert len(over) > 10
    began = sorted(turns[0].sent_s for turns in records)
    assert began[:7] == [float(number) for number in range(7)]
    # Each end is the next one's beginning; of who has only begun there is nothing to tell.
    ends = {turns[-1].ended_s for turns in over}
    assert set(began[7:]) <= ends
    assert 0 <= len(ends) - len(began[7:]) <= 7
