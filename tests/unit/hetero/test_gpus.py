"""What a node's actor does about GPUs, against the stand-in's."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.energy import EngineEnergy
from hetero.gpus import DISAGREED, RETRY_S, SILENCE_S, EngineUse, GpuKeeper
from hetero.nvml import UnknownGpu
from hetero.power import Cap
from hetero.sm_slots import NoFreeSms
from tests.nvml import standin
from tests.nvml.standin import Machine


@pytest.fixture
def keeper(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuKeeper]:
    # The guard of power caps is a process of its own.
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    keeper = GpuKeeper(tmp_path / "power")
    yield keeper
    keeper.close()


def pass_time(keeper: GpuKeeper, now_s: float, *uses: EngineUse) -> None:
    """Have these engines beat, and the keeper look."""
    for use in uses:
        keeper.beat(use, now_s)
    keeper.tick(now_s)


def limits(machine: Machine) -> list[int]:
    return [gpu.limit_mw // 1000 for gpu in machine.gpus]


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def known(energy: EngineEnergy | None) -> EngineEnergy:
    assert energy is not None
    return energy


def test_each_engine_is_told_what_its_gpus_have_used(machine: Machine, keeper: GpuKeeper) -> None:
    first, second = machine.gpus
    prefiller = EngineUse("p", (first.id,))
    decoder = EngineUse("d", (second.id,))
    machine.load(first, 280)
    machine.load(second, 150)
    second.unsupported |= standin.NO_ENERGY
    assert keeper.beat(prefiller, 0.0) is None  # Nothing is known before the first reading.
    pass_time(keeper, 0.0, decoder)
    for second_s in range(1, 11):
        machine.advance(1)
        keeper.tick(float(second_s))
    of_p, of_d = known(keeper.beat(prefiller, 10.0)), known(keeper.beat(decoder, 10.0))
    assert (of_p.joules, of_p.integrated) == (pytest.approx(2800), False)
    assert (of_d.joules, of_d.integrated) == (pytest.approx(1500), True)
    (reading,) = of_p.gpus
    assert (reading.draw_w, reading.limit_w, reading.temperature_c) == (280, 300, 40)
    assert (reading.cap_w, reading.refusal) == (None, "")
    assert of_p.epoch == of_d.epoch


def test_engines_that_share_a_gpu_share_its_energy(machine: Machine, keeper: GpuKeeper) -> None:
    uses = [EngineUse(name, (machine.gpus[0].id,)) for name in ("a", "b")]
    for now_s in (0.0, 1.0):
        pass_time(keeper, now_s, *uses)
        machine.advance(1)
    assert [known(keeper.beat(use, 1.0)).joules for use in uses] == [15, 15]


def test_what_a_gpu_does_for_others_meanwhile_is_not_counted(
    machine: Machine, keeper: GpuKeeper
) -> None:
    use = EngineUse("first", (machine.gpus[0].id,))
    pass_time(keeper, 0.0, use)
    keeper.leave("first")
    machine.advance(1000)
    keeper.tick(1000.0)
    machine.advance(1000)
    later = EngineUse("second", (machine.gpus[0].id,))
    for now_s in (2000.0, 2001.0):
        pass_time(keeper, now_s, later)
        machine.advance(1)
    assert known(keeper.beat(later, 2001.0)).joules == pytest.approx(30)


def test_a_cap_holds_for_as_long_as_an_engine_that_wants_it_lives(
    machine: Machine, keeper: GpuKeeper, tmp_path: Path
) -> None:
    first, second = machine.gpus
    decoder = EngineUse("d", (first.id,), Cap(fraction=2 / 3))
    prefiller = EngineUse("p", (second.id,))
    pass_time(keeper, 0.0, decoder, prefiller)
    assert limits(machine) == [200, 300]
    assert second.set_calls == 0
    assert known(keeper.beat(decoder, 1.0)).gpus[0].cap_w == 200
    # A guard that dies is missed, and another one takes over; nothing is lost of what was found.
    guard = keeper.state()["power_guard_pid"]
    os.kill(guard, signal.SIGKILL)
    for now_s in (RETRY_S, 2 * RETRY_S):
        pass_time(keeper, now_s, decoder, prefiller)
    assert keeper.state()["power_guard_pid"] not in (guard, None)
    assert limits(machine) == [200, 300]
    (record,) = (tmp_path / "power").glob("*.json")
    assert json.loads(record.read_text())["previous_w"] == 300
    # The engine falls silent: its GPU is not ours any more.
    now_s = 2 * RETRY_S + SILENCE_S
    keeper.beat(prefiller, now_s)
    keeper.tick(now_s + 1)
    assert limits(machine) == [300, 300]
    assert keeper.state()["power_guard_pid"] is None
    assert keeper.state()["engines"] == {"p": [second.id]}


def test_it_serves_on_uncapped_where_it_may_not_cap(
    machine: Machine, keeper: GpuKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine.gpus[0]
    first.denied = 1
    use = EngineUse("d", (first.id,), Cap(watts=200))
    for now_s in (0.0, 1.0, RETRY_S + 1, 3 * RETRY_S):
        pass_time(keeper, now_s, use)
        machine.advance(1)
    energy = known(keeper.beat(use, 3 * RETRY_S))
    assert (energy.gpus[0].cap_w, energy.gpus[0].refusal) == (None, "NoPermission")
    assert energy.joules == pytest.approx(90)
    said = [line for line in caplog.messages if "CAP_SYS_ADMIN" in line]
    assert len(said) == 1  # Not once a second.
    first.denied = 0
    pass_time(keeper, 4 * RETRY_S, use)
    assert limits(machine) == [200, 300]


def test_engines_of_different_minds_leave_a_gpu_as_it_is(
    machine: Machine, keeper: GpuKeeper
) -> None:
    first = machine.gpus[0]
    capped, free = EngineUse("d", (first.id,), Cap(watts=200)), EngineUse("p", (first.id,))
    pass_time(keeper, 0.0, capped, free)
    assert known(keeper.beat(capped, 0.0)).gpus[0].refusal == DISAGREED
    assert first.set_calls == 0
    keeper.leave("p")
    keeper.tick(1.0)
    assert known(keeper.beat(capped, 1.0)).gpus[0].refusal == ""
    assert limits(machine) == [200, 300]


def test_a_cap_ends_with_the_keeper(machine: Machine, keeper: GpuKeeper, tmp_path: Path) -> None:
    pass_time(keeper, 0.0, EngineUse("d", (machine.gpus[0].id,), Cap(watts=200)))
    assert limits(machine) == [200, 300]
    keeper.close()
    eventually(lambda: limits(machine) == [300, 300])
    assert not [*(tmp_path / "power").glob("*.json")]


def test_an_engine_leases_before_it_beats_and_keeps_it_by_beating(
    machine: Machine, keeper: GpuKeeper
) -> None:
    """It leases while its model loads, and knows its GPUs after that."""
    gpu = machine.gpus[0].id
    lease = keeper.lease(gpu, "d", 6, 0.0)
    loading = EngineUse("d", ())
    for now_s in range(1, 40):
        pass_time(keeper, float(now_s), loading)
    assert keeper.sm_ledger.leases() == [lease]
    with pytest.raises(NoFreeSms, match="d has 0 to 12 of 21 units"):
        keeper.lease(gpu, "p", 5, 40.0)
    # Loaded, it is metered, and its lease goes on.
    pass_time(keeper, 40.0, EngineUse("d", (gpu,), None, (lease,)))
    assert keeper.sm_ledger.leases() == [lease]
    # Nothing more is heard of it: its successor gets the same.
    keeper.tick(40.0 + SILENCE_S + 1)
    assert keeper.lease(gpu, "d2", 6, 57.0).units == lease.units


def test_an_engine_that_never_beats_loses_what_it_leased(
    machine: Machine, keeper: GpuKeeper
) -> None:
    keeper.lease(machine.gpus[0].id, "d", 6, 0.0)
    keeper.tick(SILENCE_S - 1)
    assert len(keeper.sm_ledger.leases()) == 1
    keeper.tick(SILENCE_S + 1)
    assert keeper.sm_ledger.leases() == []


def test_an_engine_that_leaves_frees_its_slots_at_once(machine: Machine, keeper: GpuKeeper) -> None:
    gpu = machine.gpus[0].id
    keeper.lease(gpu, "d", 10, 0.0)
    keeper.leave("d")
    assert keeper.lease(gpu, "d2", 10, 0.0).sms == 84
    keeper.leave("nobody")  # It may have been taken for dead.


def test_a_keeper_that_knows_nothing_is_told_by_beats(
    machine: Machine, keeper: GpuKeeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an engine that lives, by one that was killed; or by one that had taken it for dead."""
    gpu = machine.gpus[0].id
    use = EngineUse("d", (gpu,), None, (keeper.lease(gpu, "d", 6, 0.0),))
    again = GpuKeeper(tmp_path / "again")
    again.beat(use, 0.0)
    again.beat(use, 1.0)
    assert again.sm_ledger.leases() == list(use.leases)
    # Silent for too long, its SMs are another's when it comes back; that is said, and once.
    again.tick(1.0 + SILENCE_S + 1)
    other = again.lease(gpu, "other", 10, 20.0)
    for now_s in (21.0, 22.0):
        again.beat(use, now_s)
    assert again.sm_ledger.leases() == [other]
    said = [line for line in caplog.messages if "not its own any more" in line]
    assert len(said) == 1
    assert "d runs on SMs" in said[0]
    # The other gone, they are its own again.
    again.leave("other")
    again.beat(use, 23.0)
    assert again.sm_ledger.leases() == list(use.leases)
    again.close()


def test_sms_that_nvml_does_not_show_are_not_leased(machine: Machine, keeper: GpuKeeper) -> None:
    with pytest.raises(UnknownGpu, match="NVML does not show SMs of GPU-elsewhere"):
        keeper.lease("GPU-elsewhere", "d", 3, 0.0)


def test_a_mig_device_is_metered_with_its_gpu_and_leased_by_itself(
    machine: Machine, keeper: GpuKeeper
) -> None:
    first = machine.gpus[0]
    first.unsupported, first.mig_enabled, first.mig_devices, first.mig_sms = 0, 1, 2, 42
    part = f"MIG-1-{first.id}"
    use = EngineUse("d", (part,), Cap(watts=200))
    for now_s in (0.0, 1.0):
        pass_time(keeper, now_s, use)
        machine.advance(1)
    energy = known(keeper.beat(use, 1.0))
    assert (energy.joules, energy.gpus[0].uuid) == (30, first.id)
    assert energy.gpus[0].refusal == "CapRefused"  # Its limit is not this engine's alone.
    assert keeper.sm_ledger.lease_slots(part, "d", 10).sms == 42


def test_a_gpu_that_is_lost_says_so_once_and_costs_nothing(
    machine: Machine, keeper: GpuKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first = machine.gpus[0]
    use = EngineUse("d", (first.id,))
    pass_time(keeper, 0.0, use)
    first.lost = 1
    for now_s in (1.0, 2.0, 3.0):
        pass_time(keeper, now_s, use)
    energy = known(keeper.beat(use, 3.0))
    assert (energy.joules, energy.gpus[0].draw_w) == (0, None)
    lost = [line for line in caplog.messages if "fallen off the bus" in line]
    assert len(lost) == 1


def test_a_driver_that_does_not_open_is_tried_again(
    machine: Machine, keeper: GpuKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    machine.fail_to_open(9)
    use = EngineUse("d", (machine.gpus[0].id,))
    for now_s in (0.0, 1.0, RETRY_S):
        assert keeper.beat(use, now_s) is None
        keeper.tick(now_s)
    assert len(caplog.messages) == 1
    machine.fail_to_open(0)
    pass_time(keeper, 2 * RETRY_S, use)
    assert known(keeper.beat(use, 2 * RETRY_S)).gpus[0].name == "NVIDIA A40"
