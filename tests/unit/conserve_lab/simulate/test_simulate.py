"""The simulator against closed forms, a token-by-token engine, and its own ledger."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoscale.capacity.profile import load_profile
from conserve_lab.metrics import Tally
from conserve_lab.records import TurnRecord
from conserve_lab.simulate import Cluster, Costs, System
from conserve_lab.simulate.engine import EngineTurn, SimulatedEngine
from conserve_lab.simulate.run import EngineCounts, make_system
from tests.unit.conserve_lab.simulate.scenes import COSTS, Scripted, drawn


def _system(placement: Any = "conversation", costs: Costs = COSTS, **more: Any) -> System:
    fields: dict[str, Any] = {"prefillers": (costs,), "decoders": (costs,) * 3} | more
    return System("s", placement, **fields)


def _run(system: System, plan: Any) -> tuple[Cluster, list[TurnRecord]]:
    records: list[TurnRecord] = []
    cluster = Cluster(system, records.extend)
    cluster.run(plan)
    return cluster, records


# --- One conversation: the closed form ------------------------------------------------------------


def _prefill_s(new: int, cached: int) -> float:
    """Alone on an engine, in however many chunks, all long enough to take longer than a step."""
    whole = COSTS.per_token_s * new + COSTS.per_pair_s * ((cached + new) ** 2 - cached**2)
    return COSTS.prefill_s + whole + COSTS.per_cached_token_s * cached


def _decode_s(context: int, steps: int) -> float:
    """Alone on an engine: the sum over steps of a constant and of the KV read, one more each."""
    each_s = COSTS.step_s + COSTS.per_sequence_s
    kv = sum(context + step for step in range(steps))
    return steps * each_s + COSTS.per_kv_token_s * kv


def test_one_conversation_takes_what_the_formula_says() -> None:
    script = Scripted([(15_000, 0, 200, 0.0), (15_500, 15_000, 50, 2.0)])
    cluster, (first, second) = _run(_system(), [(1.0, script)])

    # The prefiller's chunks, the handoff of whole chunks, and the decoder's step for the rest.
    moved = 15_000 // 256 * 256
    ttft_s = (
        _prefill_s(15_000, 0)
        + COSTS.handoff_s
        + COSTS.handoff_per_token_s * moved
        + _prefill_s(15_000 - moved, moved)
    )
    assert first.sent_s == 1.0
    assert first.first_token_s == pytest.approx(1.0 + ttft_s, rel=1e-12)
    assert first.ended_s == pytest.approx(1.0 + ttft_s + _decode_s(15_001, 199), rel=1e-12)

    assert second.sent_s == pytest.approx(first.ended_s + 2.0)
    found = 15_000 // 16 * 16
    append_s = _prefill_s(15_500 - found, found)
    assert second.first_token_s == pytest.approx(second.sent_s + append_s, rel=1e-12)
    assert second.ended_s == pytest.approx(
        second.sent_s + append_s + _decode_s(15_501, 49), rel=1e-12
    )
    assert second.cached_tokens == found
    assert (first.last, second.last, second.effective) == (False, True, True)

    figures = cluster.figures(kv_bytes_per_token=10)
    assert (figures.handoffs, figures.handoff_tokens, figures.handoff_bytes) == (
        1, moved, 10 * moved,
    )  # fmt: skip


def test_what_kv_space_is_used_for_is_what_the_formula_says() -> None:
    """One conversation of two turns, on one of three decoders, until the second one ends."""
    script = Scripted([(15_000, 0, 200, 0.0), (15_500, 15_000, 50, 2.0)])
    cluster, (first, second) = _run(_system(), [(1.0, script)])
    shares = cluster.figures(1.0).kv_shares
    whole = 3 * COSTS.capacity_tokens * second.ended_s
    assert first.first_token_s is not None
    assert second.first_token_s is not None
    # As each turn began, its history held the prompt, and then that and its output.
    decode = 15_000 * (first.ended_s - first.first_token_s)
    decode += 15_200 * (second.ended_s - second.first_token_s)
    assert shares["decode"] == pytest.approx(decode / whole)
    # Of what the second turn computed 300 tokens are beyond 15,200. What was put out is not found
    # again, as in a recording's replay: it counts as lost.
    found = 15_000 // 16 * 16
    computed = 15_500 - found
    before = 15_200 * (second.first_token_s - second.sent_s)
    assert shares["recompute"] == pytest.approx(before * (computed - 300) / computed / whole)
    prefill = 15_000 * (first.first_token_s - first.sent_s) + before * 300 / computed
    assert shares["prefill"] == pytest.approx(prefill / whole)
    assert shares["caching"] == pytest.approx(15_200 * 2.0 / whole)
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("placement", ["conversation", "full_disaggregation", "collocated"])
def test_what_a_turn_takes_beside_its_engines_delays_its_first_token(placement: str) -> None:
    def first_tokens(**overhead: float) -> list[float]:
        prefillers = () if placement == "collocated" else (COSTS,)
        system = _system(placement, prefillers=prefillers, **overhead)
        script = Scripted([(15_000, 0, 200, 0.0), (15_500, 15_000, 50, 2.0)])
        _, records = _run(system, [(1.0, script)])
        return [one.first_token_s - one.sent_s for one in records if one.first_token_s is not None]

    without = first_tokens()
    assert first_tokens(direct_s=0.0, handed_off_s=0.0) == without
    longer = first_tokens(direct_s=0.25, handed_off_s=0.5)
    handed_off = {
        "conversation": (True, False),
        "full_disaggregation": (True, True),
        "collocated": (False, False),
    }[placement]
    for before, after, moved in zip(without, longer, handed_off, strict=True):
        assert after - before == pytest.approx(0.5 if moved else 0.25)


def test_a_system_has_its_profiles_overhead() -> None:
    profile = load_profile("cpu-embedded")
    system = make_system("conserve", profile, EngineCounts(prefillers=1, decoders=1))
    assert (system.direct_s, system.handed_off_s) == (
        profile.overhead.direct_s,
        profile.overhead.handed_off_s,
    )
    assert system.direct_s > 0
    assert make_system("conserve", profile, EngineCounts(), direct_s=0.0).direct_s == 0


def test_energy_is_that_of_every_engine_busy_or_idle() -> None:
    cluster, (turn,) = _run(_system(), [(0.0, Scripted([(1_000, 0, 100, 0.0)]))])
    prefill_s = _prefill_s(1_000, 0)
    rest_s = _prefill_s(1_000 - 768, 768)
    decode_s = _decode_s(1_001, 99)
    assert turn.ended_s == pytest.approx(
        prefill_s + rest_s + decode_s + COSTS.handoff_s + 768 * COSTS.handoff_per_token_s
    )
    busy_j = (prefill_s + rest_s) * 300 + decode_s * 200
    idle_j = (4 * turn.ended_s - prefill_s - rest_s - decode_s) * 30
    assert cluster.energy_j() == pytest.approx(busy_j + idle_j, rel=1e-12)
    unknown = replace(COSTS, idle_w=None)
    assert _run(_system(costs=unknown), [])[0].energy_j() is None


# --- Many on one engine: token by token -----------------------------------------------------------


def _token_by_token(costs: Costs, arrivals: list[tuple[float, int, int]]) -> list[float]:
    """When each of the turns (arrival, prompt, output) ends: one step after the other."""
    left = [prompt for _, prompt, _ in arrivals]
    made = [0] * len(arrivals)
    ends = [0.0] * len(arrivals)
    now_s, coming, prefilling, decoding = 0.0, list(range(len(arrivals))), [], []
    while coming or prefilling or decoding:
        if not prefilling and not decoding:
            now_s = max(now_s, arrivals[coming[0]][0])
        while coming and arrivals[coming[0]][0] <= now_s + 1e-12:
            prefilling.append(coming.pop(0))
        kv = sum(arrivals[i][1] + made[i] for i in decoding)
        step_s = costs.step_s + costs.per_sequence_s * len(decoding) + costs.per_kv_token_s * kv
        room, added_s, completed = costs.batched_tokens - len(decoding), 0.0, []
        begun = 0
        for i in list(prefilling):
            chunk = min(room, left[i])
            if chunk == 0:
                break
            past = arrivals[i][1] - left[i]
            begun += past == 0
            added_s += costs.per_token_s * chunk
            added_s += costs.per_pair_s * ((past + chunk) ** 2 - past**2)
            left[i] -= chunk
            room -= chunk
            if left[i] == 0:
                prefilling.remove(i)
                completed.append(i)
        if added_s and decoding:
            now_s += step_s + costs.prefill_share * added_s
        elif begun:
            now_s += begun * costs.prefill_s + added_s
        elif added_s:
            now_s += max(costs.step_s, added_s)
        else:
            now_s += step_s
        for i in decoding + completed:
            made[i] += 1
            if made[i] == arrivals[i][2]:
                ends[i] = now_s
        decoding = [i for i in decoding + completed if not ends[i]]
    return ends


def _by_event(costs: Costs, arrivals: Sequence[tuple[float, int, int]], **more: Any) -> list[float]:
    """The same from an `SimulatedEngine`, whose steps are taken together."""
    events: list[tuple[float, int, int]] = []
    ends = [0.0] * len(arrivals)

    def finished(work: EngineTurn, engine: SimulatedEngine, now_s: float) -> None:
        assert isinstance(work.turn, int)
        assert not ends[work.turn], "a turn ended twice"
        ends[work.turn] = now_s

    def schedule(at_s: float, engine: SimulatedEngine, version: int) -> None:
        events.append((at_s, 1, version))

    engine = SimulatedEngine("e", costs, schedule, finished, keeps=False, **more)
    events += [(at_s, 0, i) for i, (at_s, _, _) in enumerate(arrivals)]
    while events:
        events.sort()
        at_s, kind, what = events.pop(0)
        if kind == 0:
            _, prompt, output = arrivals[what]
            engine.submit(EngineTurn(f"c{what}", prompt, output, turn=what), at_s)
        else:
            engine.wake(at_s, what)
        assert engine.active_tokens + engine.idle_tokens <= costs.capacity_tokens
    assert engine.active_tokens == 0
    return ends


@pytest.mark.parametrize("seed", range(12))
def test_steps_taken_together_are_steps_taken_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    now_s, arrivals = 0.0, []
    for _ in range(25):
        now_s += draw.expovariate(4.0)
        arrivals.append((now_s, draw.randint(1, 6_000), draw.randint(1, 120)))
    costs = replace(COSTS, per_cached_token_s=0.0, per_kv_token_s=draw.choice([0.0, 4e-8, 2e-6]))
    assert _by_event(costs, arrivals) == pytest.approx(_token_by_token(costs, arrivals), rel=1e-9)


def test_a_prompts_constant_is_paid_once_by_each_prompt() -> None:
    def alone_s(prompt: int) -> float:
        """What the profile's curve says."""
        return COSTS.prefill_s + COSTS.per_token_s * prompt + COSTS.per_pair_s * prompt * prompt

    # Three chunks are one prompt; three prompts in one step are three.
    assert _by_event(COSTS, [(0.0, 6_000, 1)]) == pytest.approx([alone_s(6_000)])
    # The first has a step to itself, since the others come during it.
    arrivals = [(0.0, 600, 1), (1e-3, 600, 1), (1e-3, 600, 1)]
    ends = [alone_s(600), 3 * alone_s(600), 3 * alone_s(600)]
    assert _by_event(COSTS, arrivals) == pytest.approx(ends)
    # A chunk of a single token still takes a step.
    assert _by_event(COSTS, [(0.0, 2_049, 1)]) == pytest.approx([alone_s(2_048) + COSTS.step_s])


# --- KV -------------------------------------------------------------------------------------------


def _ledger(cluster: Cluster) -> tuple[int, int]:
    """Tokens held for conversations between turns: by engines, and as the table says."""
    held = said = 0
    for conversation in cluster.table.live():
        if conversation.running or conversation.home is None:
            continue
        held += cluster.decoders[conversation.home].holds(conversation.id)
        said += conversation.held_tokens
    return held, said


@pytest.mark.parametrize(
    "placement", ["conversation", "collocated", "full_disaggregation", "per_turn"]
)
def test_every_turn_ends_once_and_the_ledger_is_right(placement: str) -> None:
    workload = drawn()
    ledgers: list[tuple[int, int]] = []
    records: list[TurnRecord] = []

    def ended(turns: list[TurnRecord]) -> None:
        records.extend(turns)
        ledgers.append(_ledger(cluster))

    more: dict[str, Any] = {"wrong_decision_rate": 0.3} if placement == "per_turn" else {}
    cluster = Cluster(_system(placement, replace(COSTS, capacity_tokens=10**7), **more), ended)
    cluster.run(workload)

    assert len(records) == workload.counts["turns"] == cluster.turns
    assert set(Counter((r.conversation, r.turn) for r in records).values()) == {1}
    assert {record.outcome for record in records} == {"completed"}
    assert sum(record.last for record in records) == workload.counts["conversations"]
    assert all(r.sent_s < (r.first_token_s or 0) <= r.ended_s for r in records)
    assert all(held == said for held, said in ledgers)
    assert max(said for _, said in ledgers) > 100_000
    assert not len(cluster.table)
    for engine in cluster.decoders.values():
        assert engine.active_tokens == engine.idle_tokens == 0
    assert all(not decoder.held_tokens for decoder in cluster.table.decoders.values())
    assert all(not prefiller.queued_tokens for prefiller in cluster.table.prefillers.values())


# --- The live system's decisions ------------------------------------------------------------------


def test_the_same_seed_gives_the_same_result_to_the_last_digit() -> None:
    system = _system("per_turn", wrong_decision_rate=0.4)
    once, again = (_run(system, drawn())[1] for _ in range(2))
    assert once == again
    assert _run(system, drawn(seed=1))[1] != once


def test_decisions_that_are_never_wrong_are_conserves_own() -> None:
    assert (
        _run(_system("per_turn", wrong_decision_rate=0.0), drawn())[1]
        == _run(_system("conversation"), drawn())[1]
    )


def test_decisions_that_are_always_wrong_are_full_disaggregation() -> None:
    wrong, records = _run(_system("per_turn", wrong_decision_rate=1.0), drawn())
    assert records == _run(_system("full_disaggregation"), drawn())[1]
    later = sum(record.turn > 1 for record in records)
    assert wrong.figures(1.0).later_prefills == later > 0


def test_what_history_costs_a_prefiller() -> None:
    """Computed again, it costs more than brought; brought, more than found."""

    def busy_s(history: str) -> float:
        system = _system("full_disaggregation", history=history, transfers_block=True)
        cluster, _ = _run(system, drawn(20, rate_per_s=0.1))
        return cluster.prefillers["prefiller-0"].busy_prefill_s

    assert busy_s("recomputed") > 2 * busy_s("moved") > 2 * busy_s("kept")


def test_a_transfer_that_blocks_delays_those_who_decode_there() -> None:
    # Decodes from 0.1 s on, and takes another conversation over meanwhile.
    scripts = [
        (0.0, Scripted([(500, 0, 400, 0.0)], "a")),
        (0.1, Scripted([(30_000, 0, 2, 0.0)], "b")),
    ]
    ends = []
    for block in (False, True):
        fresh = [(at_s, replace(script, at=0)) for at_s, script in scripts]
        system = _system(decoders=(COSTS,), transfers_block=block)
        _, records = _run(system, fresh)
        ends.append(next(r.ended_s for r in records if r.conversation == "a"))
    moved = 30_000 // 256 * 256
    assert ends[1] - ends[0] == pytest.approx(
        COSTS.handoff_s + COSTS.handoff_per_token_s * moved, rel=0.02
    )


# --- Refusals -------------------------------------------------------------------------------------


def test_without_room_conversations_wait_in_line_and_then_give_up() -> None:
    small = replace(COSTS, capacity_tokens=20_000)
    plan = [(0.0, Scripted([(15_000, 0, 2_000, 0.0)], name)) for name in ("a", "b", "c")]
    patient = _system(costs=small, decoders=(small,))
    _, records = _run(patient, [(at, replace(script, at=0)) for at, script in plan])
    assert [record.outcome for record in records] == ["completed"] * 3
    assert records[0].ended_s < (records[1].first_token_s or 0)

    hasty = replace(patient, queue_timeout_s=3.0)
    _, records = _run(hasty, [(at, replace(script, at=0)) for at, script in plan])
    failed = [record for record in records if record.outcome == "failed"]
    assert [record.ended_s for record in failed] == [3.0, 3.0]
    assert "429" in (failed[0].error or "")

    full = replace(patient, queue_limit=1)
    _, records = _run(full, [(at, replace(script, at=0)) for at, script in plan])
    assert Counter(record.outcome for record in records) == {"completed": 2, "failed": 1}


def test_a_turn_that_no_engine_holds_fails_alone() -> None:
    long = Scripted([(1_000, 0, 10, 0.0), (400_000, 1_000, 10, 1.0)], "long")
    cluster, records = _run(_system(), [(0.0, long), (5.0, Scripted([(100, 0, 5, 0.0)], "d"))])
    assert [record.outcome for record in records] == ["completed", "failed", "completed"]
    assert "300000" in (records[1].error or "")
    assert not len(cluster.table)


# --- Profiles and metrics -------------------------------------------------------------------------


def test_a_power_cap_slows_down_what_the_profile_says_it_does() -> None:
    profile = load_profile("a40-qwen3-0.6b")
    free, capped = Costs.of(profile, "decoder"), Costs.of(profile, "decoder", 200.0)
    slower = profile.power_at(200.0)
    assert capped.per_token_s == free.per_token_s * slower.prefill_slowdown
    assert capped.per_kv_token_s == free.per_kv_token_s * slower.decode_slowdown
    assert (capped.decode_w, free.decode_w) == (slower.decode_w, profile.power_at(None).decode_w)
    assert Costs.of(profile, "collocated").batched_tokens == 2_944


def test_metrics_of_simulated_turns_need_no_token_times() -> None:
    tally = Tally(keep_samples=True)
    cluster = Cluster(_system(), tally.add)
    cluster.run([(0.0, Scripted([(1_000, 0, 101, 0.0)]))])
    result = tally.result()
    assert tally.samples is not None
    (ttft_s,) = tally.samples["ttft"]["c"]
    (latency_s,) = tally.samples["latency"]["c"]
    assert result.latencies["tbt"].p50 == pytest.approx((latency_s - ttft_s) / 100)
    assert result.latencies["last_tbt"].mean == result.latencies["tbt"].mean
    assert "tbt_p95" not in result.latencies


# --- Pausing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pausing", "refused"), [(False, 1), (True, 0)])
def test_who_is_away_gives_up_room_where_idle_conversations_are_paused(
    pausing: bool, refused: int
) -> None:
    """Five of 60,000 tokens fill a decoder for an hour; then another one comes."""
    first = [
        (float(n), Scripted([(60_000, 0, 10, 0.0), (60_100, 60_000, 10, 3600.0)], f"idle-{n}"))
        for n in range(5)
    ]
    late = (1800.0, Scripted([(50_000, 0, 10, 0.0)], "late"))
    system = _system(decoders=(COSTS,), pausing=pausing)
    cluster, records = _run(system, [*first, late])
    failed = [one.conversation for one in records if one.outcome == "failed"]
    assert failed == ["late"] * refused
    completed = [one.conversation for one in records if one.outcome == "completed"]
    assert len(completed) == 11 - refused
    paused = 0 if cluster.table.memory is None else cluster.table.memory.pauses["room"]
    assert (paused > 0) == pausing
    assert all(one.held_tokens == 0 for one in cluster.table.decoders.values())


@pytest.mark.parametrize(
    ("host_tokens", "restores", "prefilled"),
    [(0, {"again": 2}, 800_200), (1_000_000, {"reloaded": 2}, 400_000)],
)
def test_what_is_parked_makes_room_and_comes_back_without_a_prefill(
    host_tokens: int, restores: dict[str, int], prefilled: int
) -> None:
    """Two of 200,000 tokens take turns on a decoder that has room for one."""
    scripts = [
        (start_s, Scripted([(200_000, 0, 10, 0.0), (200_100, 200_010, 10, 60.0)], name))
        for start_s, name in ((0.0, "a"), (15.0, "b"))
    ]
    system = _system(decoders=(COSTS,), pausing=True, host_tokens=host_tokens)
    cluster, records = _run(system, scripts)
    assert {one.outcome for one in records} == {"completed"}
    assert cluster.table.memory is not None
    assert cluster.table.memory.restores == restores
    assert cluster.figures(1.0).cold_prefill_tokens == prefilled
    # To come from host memory takes no longer than a handoff.
    for one in records:
        if one.turn > 1 and host_tokens:
            assert one.first_token_s is not None
            assert one.first_token_s - one.sent_s < COSTS.handoff(200_000) + 0.2
