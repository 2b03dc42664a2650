"""Energy: metered within half a percent, attributed without a joule lost, shared by busy time."""

import random

import pytest

from conserve.turn import TurnKey
from hetero.energy import BusyShare, EnergyBook, EnergyMeter, EngineEnergy, GpuReading
from hetero.nvml import NotSupported, Nvml
from tests.nvml import standin
from tests.nvml.standin import Machine, StandInGpu

# --- the meter ---------------------------------------------------------------------------------


def read(nvml: Nvml, gpu: StandInGpu, meter: EnergyMeter, now_s: float) -> float:
    try:
        counter_j = nvml.energy_j(gpu.id)
    except NotSupported:
        counter_j = None
    return meter.read(now_s, counter_j, nvml.draw_w(gpu.id))


@pytest.mark.parametrize("counts", [True, False])
def test_an_hour_of_known_power_is_metered_within_half_a_percent(
    machine: Machine, nvml: Nvml, counts: bool
) -> None:
    """Bursts of a few seconds on both GPUs, one of them capped, read about once a second."""
    rng = random.Random(7)
    first, second = machine.gpus
    nvml.set_limit_w(second.id, 200)
    for gpu in machine.gpus:
        gpu.unsupported |= 0 if counts else standin.NO_ENERGY
    meters = {gpu.id: EnergyMeter() for gpu in machine.gpus}
    for gpu in machine.gpus:
        read(nvml, gpu, meters[gpu.id], 0.0)
    known_j, metered_j = dict.fromkeys(meters, 0.0), dict.fromkeys(meters, 0.0)
    now_s, read_s, changed_s = 0.0, 1.0, 0.0
    while now_s < 3600:
        if now_s >= changed_s:
            machine.load(first, rng.choice([30, 120, 290, 300]))
            machine.load(second, rng.choice([30, 250, 300]))
            changed_s = now_s + rng.uniform(0.5, 8)
        step_s = min(read_s, changed_s, 3600.0) - now_s
        for gpu in machine.gpus:
            known_j[gpu.id] += gpu.draw_mw / 1e3 * step_s
        machine.advance(step_s)
        now_s += step_s
        if now_s >= read_s or now_s >= 3600:
            for gpu in machine.gpus:
                metered_j[gpu.id] += read(nvml, gpu, meters[gpu.id], now_s)
            read_s = now_s + rng.uniform(0.9, 1.1)
    for uuid, meter in meters.items():
        assert metered_j[uuid] == pytest.approx(known_j[uuid], rel=0.005)
        assert meter.integrated is not counts
    # The power was known, and the cap held.
    assert known_j[first.id] != pytest.approx(known_j[second.id], rel=0.02)
    assert known_j[second.id] < 200 * 3600


def test_a_counter_that_starts_anew_loses_and_invents_nothing() -> None:
    meter = EnergyMeter()
    used = [meter.read(t, j, 100.0) for t, j in enumerate([5000.0, 5100.0, 40.0, 140.0])]
    assert used == [0, 100, 40, 100]
    assert meter.integrated is False


def test_time_without_readings_is_not_made_up_from_samples() -> None:
    meter = EnergyMeter()
    readings = [(0.0, 100.0), (1.0, 200.0), (2.0, None), (60.0, 100.0), (61.0, 100.0)]
    used = [meter.read(t, None, draw_w) for t, draw_w in readings]
    assert used == [0, 150, 0, 0, 100]
    assert meter.integrated


# --- shares ------------------------------------------------------------------------------------


def test_a_share_is_by_busy_time_and_idling_is_nobodys() -> None:
    shares = BusyShare(0.0)
    shares.start("long", 0.0)
    shares.start("short", 1.0)
    shares.stop("short", 2.0)
    shares.stop("long", 3.0)
    shares.stop("unknown", 3.0)
    # Busy for 3 of 4 seconds; 3 and 1 seconds of turns.
    assert shares.charge(400.0, 4.0) == {"long": 225, "short": 75}
    assert shares.charge(100.0, 5.0) == {}
    shares.start("next", 5.5)
    assert shares.charge(100.0, 6.0) == {"next": 50}
    for key in ("next", "other"):
        shares.start(key, 6.5)
    assert shares.charge(90.0, 7.0) == pytest.approx({"next": 60, "other": 30})
    for key in ("next", "other"):
        shares.stop(key, 7.5)
    assert shares.charge(100.0, 9.0) == {"next": 12.5, "other": 12.5}


# --- the book ----------------------------------------------------------------------------------


def said(joules: float, epoch: str = "1", integrated: bool = False) -> EngineEnergy:
    gpu = GpuReading("GPU-1", "A40", 250.0, 200.0, 0.9, 61, cap_w=200.0)
    return EngineEnergy(joules, epoch, integrated, (gpu,))


def test_roles_and_tiers_sum_to_what_was_reported() -> None:
    book = EnergyBook()
    rng = random.Random(3)
    engines = [("p", "prefiller", "fast"), ("d1", "decoder", "frugal"), ("d2", "decoder", "fast")]
    totals = {id: 50.0 for id, _, _ in engines}
    for second in range(100):
        for engine_id, role, tier in engines:
            totals[engine_id] += rng.uniform(0, 300)
            book.report(engine_id, role, tier, said(totals[engine_id]), float(second))
    book.remove_engine("d1")
    book.report("p", "prefiller", "fast", said(7.0, epoch="2"), 101.0)  # The node's actor is new.
    used = sum(book.joules.values())
    assert used == pytest.approx(sum(use.joules for use in book.tiers.values()))
    assert used == pytest.approx(book.overall.joules)
    assert set(book.joules) == {(role, tier) for _, role, tier in engines}


def test_the_first_report_is_a_beginning() -> None:
    """What a GPU has used before the table knew of it is nobody's."""
    book = EnergyBook()
    assert book.report("d", "decoder", "x", said(1e6), 0.0) == {}
    book.report("d", "decoder", "x", said(1e6 + 30), 1.0)
    assert book.joules == {("decoder", "x"): 30}


def test_a_turn_takes_from_the_engines_that_it_ran_on() -> None:
    book = EnergyBook()
    book.report("p", "prefiller", "fast", said(0), 0.0)
    book.report("d", "decoder", "slow", said(0), 0.0)
    book.run(TurnKey("a", 5, 1), "p", 0.0)
    book.run(TurnKey("a", 5, 1), "d", 0.5)  # Handed off.
    book.run(TurnKey("b", 6, 2), "d", 0.5)
    book.end(TurnKey("a", 5, 1), 1.0)
    book.end(TurnKey("a", 5, 1), 1.0)
    assert book.report("p", "prefiller", "fast", said(100), 1.0) == {("a", 5): 50}
    assert book.report("d", "decoder", "slow", said(80), 1.0) == {("a", 5): 20, ("b", 6): 20}
    assert book.report("d", "decoder", "slow", said(100), 2.0) == {("b", 6): 20}
    book.remove_engine("d")
    book.end(TurnKey("b", 6, 2), 3.0)
    assert book.report("d", "decoder", "slow", said(200), 4.0) == {}


def test_a_prefill_has_its_seconds_of_an_engines_power_while_turns_run() -> None:
    book, turn = EnergyBook(), TurnKey("a", 1, 1)
    book.report("d", "decoder", "x", said(0), 0.0)
    book.run(turn, "d", 0.0)
    assert book.prefilled("d", 1.0) == 0  # Its power is not known yet.
    book.report("d", "decoder", "x", said(1000), 4.0)
    assert book.end(turn, 4.0) == "d"
    book.report("d", "decoder", "x", said(1100), 8.0)  # Idle.
    assert [book.prefilled("d", 1.0), book.prefilled("d", None)] == [250, 0]
    assert book.prefilled("cpu", 1.0) == book.prefilled(None, 1.0) == 0


def test_prompts_that_are_computed_at_once_have_what_the_engine_used() -> None:
    book, all_j = EnergyBook(), 0.0
    for at in range(1001):
        book.report("p", "prefiller", "x", said(3000.0 * at), 10.0 * at)
        book.run(TurnKey("a", 1, at), "p", 10.0 * at)
        prefills = [book.prefilled("p", 10.0) for _ in range(3)]
        all_j += sum(prefills)
        assert all_j < 3000.0 * at + 0.1
    assert all_j == pytest.approx(3000.0 * at)
    assert prefills == pytest.approx([1000] * 3, rel=0.01)


def test_turns_of_engines_that_report_nothing_leave_nothing() -> None:
    book = EnergyBook()
    book.run(TurnKey("a", 1, 1), "cpu", 0.0)
    book.end(TurnKey("a", 1, 1), 1.0)
    book.computed("cpu", 100)
    assert (book.joules, book.tiers, book._turns) == ({}, {}, {})
    # Nor of those that do no more.
    book.report("d", "decoder", "x", said(0), 0.0)
    book.run(TurnKey("a", 1, 1), "d", 1000.0)
    assert (book.engines, book._turns) == ({}, {})
