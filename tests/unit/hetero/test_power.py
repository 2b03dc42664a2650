"""Power caps are put back whatever ends their owner, and refused where they are not ours."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.guard import Guard, GuardLost
from hetero.nvml import GpuLost, NoPermission, Nvml, PowerReading
from hetero.power import Cap, CapRefused, HasOwner, PowerCaps, Record, recover
from tests.checkout import ROOT
from tests.nvml.standin import Machine

PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "power"


@pytest.fixture
def gpu(machine: Machine) -> str:
    return machine.gpus[0].id


def limits(machine: Machine) -> list[int]:
    """What the stand-in's state says, in watts."""
    return [gpu.limit_mw // 1000 for gpu in machine.gpus]


def records(folder: Path) -> list[Record]:
    return [Record(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# --- what a cap may be -------------------------------------------------------------------------

A40 = PowerReading(draw_w=250, limit_w=300, default_w=300, min_w=100, max_w=300)


def test_a_cap_is_in_watts_or_a_fraction_of_the_default() -> None:
    assert Cap(watts=200).limit_w(A40) == 200
    assert Cap(fraction=2 / 3).limit_w(A40) == 200  # The paper's A40 (§5.5).
    assert Cap(fraction=0.5).limit_w(PowerReading(0, 300, 345.7, 100, 400)) == 172.8
    for bad in ({}, {"watts": 200, "fraction": 0.5}):
        with pytest.raises(ValueError, match="one of the two"):
            Cap(**bad)


@pytest.mark.parametrize("watts", [99.9, 300.1, 0, -5])
def test_values_outside_the_constraints_are_refused(watts: float) -> None:
    with pytest.raises(CapRefused, match="100 to 300 W"):
        Cap(watts=watts).limit_w(A40)


# --- in one process ----------------------------------------------------------------------------


def test_it_is_put_back_at_the_end(machine: Machine, nvml: Nvml, folder: Path, gpu: str) -> None:
    with PowerCaps(nvml, "test", folder) as caps:
        assert caps.apply(gpu, Cap(watts=200), {gpu}) == 200
        assert limits(machine) == [200, 300]
        (record,) = records(folder)
        assert (record.previous_w, record.caps_w, record.pid) == (300, [200], os.getpid())
        # Another value of the same owner's; what to put back stays what was found.
        assert caps.apply(gpu, Cap(fraction=0.5), {gpu}) == 150
        assert limits(machine) == [150, 300]
    assert limits(machine) == [300, 300]
    assert records(folder) == []


def test_the_limit_that_was_found_is_on_disk_before_it_changes(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = []
    change = nvml.set_limit_w

    def look_first(uuid: str, limit_w: float) -> None:
        (record,) = records(folder)
        on_disk.append((record.previous_w, limit_w in record.caps_w))
        change(uuid, limit_w)

    monkeypatch.setattr(nvml, "set_limit_w", look_first)
    caps = PowerCaps(nvml, "test", folder)
    caps.apply(gpu, Cap(watts=200), {gpu})
    caps.apply(gpu, Cap(watts=150), {gpu})
    assert on_disk == [(300, True), (300, True)]
    assert [done.outcome for done in caps.restore_all()] == ["restored"]


def test_it_is_put_back_after_an_exception(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    machine.gpus[0].limit_mw = 250_000  # What was found, whatever the default is.

    def fail() -> None:
        with PowerCaps(nvml, "test", folder) as caps:
            assert caps.apply(gpu, Cap(watts=200), {gpu}) == 200
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert limits(machine) == [250, 300]
    assert records(folder) == []


def refused_without_a_change(machine: Machine, folder: Path) -> None:
    assert limits(machine) == [300, 300]
    assert [gpu.set_calls for gpu in machine.gpus] == [0, 0]
    assert records(folder) == []


def test_a_cap_outside_the_constraints_changes_nothing(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    with PowerCaps(nvml, "test", folder) as caps:
        for cap in (Cap(watts=50), Cap(fraction=0.1), Cap(watts=301)):
            with pytest.raises(CapRefused, match="outside"):
                caps.apply(gpu, cap, {gpu})
    refused_without_a_change(machine, folder)


def test_a_gpu_that_is_not_ours_is_not_touched(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    with (
        PowerCaps(nvml, "test", folder) as caps,
        pytest.raises(CapRefused, match="no replica of ConServe uses"),
    ):
        caps.apply(gpu, Cap(watts=200), {machine.gpus[1].id})
    refused_without_a_change(machine, folder)


def test_a_gpu_in_mig_mode_is_not_touched(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    first = machine.gpus[0]
    first.unsupported, first.mig_enabled, first.mig_devices, first.mig_sms = 0, 1, 2, 42
    with PowerCaps(nvml, "test", folder) as caps, pytest.raises(CapRefused, match="MIG"):
        caps.apply(gpu, Cap(watts=200), {gpu})
    refused_without_a_change(machine, folder)


def test_a_second_owner_is_refused(machine: Machine, nvml: Nvml, folder: Path, gpu: str) -> None:
    with PowerCaps(nvml, "the first", folder) as first:
        first.apply(gpu, Cap(watts=200), {gpu})
        calls = machine.gpus[0].set_calls
        second = PowerCaps(nvml, "second", folder)
        with pytest.raises(HasOwner, match=f"the first .process {os.getpid()}"):
            second.apply(gpu, Cap(watts=150), {gpu})
        assert second.restore_all() == []
        (left,) = recover(nvml, folder)
        assert (left.outcome, limits(machine)) == ("held", [200, 300])
        assert machine.gpus[0].set_calls == calls
    assert limits(machine) == [300, 300]


def test_without_permission_nothing_is_left_behind(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    machine.gpus[0].denied = 1
    with PowerCaps(nvml, "test", folder) as caps:
        with pytest.raises(NoPermission, match="CAP_SYS_ADMIN"):
            caps.apply(gpu, Cap(watts=200), {gpu})
        assert caps.held == []
    assert (limits(machine), records(folder)) == ([300, 300], [])


def test_a_record_that_cannot_be_written_keeps_the_limit_as_it_is(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    folder.mkdir()
    (folder / f"{gpu}.new").mkdir()
    with PowerCaps(nvml, "test", folder) as caps, pytest.raises(OSError, match="directory"):
        caps.apply(gpu, Cap(watts=200), {gpu})
    refused_without_a_change(machine, folder)


def test_a_limit_that_somebody_else_set_since_is_left(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    caps = PowerCaps(nvml, "test", folder)
    caps.apply(gpu, Cap(watts=200), {gpu})
    machine.gpus[0].limit_mw = 220_000
    (done,) = caps.restore_all()
    assert (done.outcome, limits(machine), records(folder)) == ("changed", [220, 300], [])


def test_a_gpu_that_is_lost_meanwhile_is_restored_when_it_is_back(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    caps = PowerCaps(nvml, "test", folder)
    caps.apply(gpu, Cap(watts=200), {gpu})
    machine.gpus[0].lost = 1
    assert [done.outcome for done in caps.restore_all()] == ["failed"]
    with pytest.raises(GpuLost):
        caps.apply(gpu, Cap(watts=150), {gpu})
    machine.gpus[0].lost = 0
    assert [done.outcome for done in recover(nvml, folder)] == ["restored"]
    assert (limits(machine), records(folder)) == ([300, 300], [])


def test_a_record_from_before_the_change_needs_none(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    """Its owner was killed between writing it and setting the limit."""
    folder.mkdir()
    record = {"uuid": gpu, "previous_w": 300, "caps_w": [200], "owner": "x", "pid": 1, "since_s": 0}
    (folder / f"{gpu}.json").write_text(json.dumps(record))
    assert [done.outcome for done in recover(nvml, folder)] == ["restored"]
    refused_without_a_change(machine, folder)
    # And between one cap and another.
    (folder / f"{gpu}.json").write_text(json.dumps({**record, "caps_w": [200, 150]}))
    machine.gpus[0].limit_mw = 200_000
    assert [done.outcome for done in recover(nvml, folder)] == ["restored"]
    assert limits(machine) == [300, 300]


def test_a_record_that_cannot_be_read_is_kept_and_does_not_hinder_others(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str
) -> None:
    other = machine.gpus[1].id
    PowerCaps(nvml, "test", folder).apply(other, Cap(watts=200), {other})
    (folder / f"{gpu}.json").write_text("{")
    outcomes = {done.uuid: done for done in recover(nvml, folder)}
    assert outcomes[other].outcome == "restored"
    assert outcomes[gpu].outcome == "failed"
    assert "nvidia-smi -q -d POWER" in outcomes[gpu].detail
    assert (folder / f"{gpu}.json").exists()


# --- processes that end ------------------------------------------------------------------------

OWNER = """
import sys, time
from pathlib import Path
from hetero.nvml import Nvml
from hetero.power import Cap, PowerCaps

folder, gpu = sys.argv[1:]
with Nvml() as nvml, PowerCaps(nvml, "owner", Path(folder)) as caps:
    caps.apply(gpu, Cap(watts=200), {gpu})
    print("capped", flush=True)
    time.sleep(600)
"""

GUARDED = """
import sys, time
from pathlib import Path
from hetero.guard import Guard
from hetero.power import Cap

folder, gpu = sys.argv[1:]
guard = Guard("guarded", Path(folder))
assert guard.want({gpu: Cap(watts=200)}, {gpu}).applied_w == {gpu: 200}
print("capped", guard.pid, flush=True)
time.sleep(600)
"""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(machine: Machine, folder: Path, gpu: str) -> Iterator[Start]:
    """Runs a program that caps the first GPU; returns when it has."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder), gpu],
            cwd=ROOT,
            env=machine.environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("capped")
        assert limits(machine) == [200, 300]
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_after_sigkill_the_next_one_finds_the_record(
    machine: Machine, nvml: Nvml, folder: Path, gpu: str, start: Start
) -> None:
    owner = start(OWNER)
    owner.kill()
    owner.wait()
    assert limits(machine) == [200, 300]
    # The next owner puts back what the last one found, not what it left.
    with PowerCaps(nvml, "next", folder) as caps:
        caps.apply(gpu, Cap(watts=150), {gpu})
        assert records(folder)[0].previous_w == 300
    assert limits(machine) == [300, 300]


def test_the_cap_of_a_killed_owner_is_undone_and_not_that_of_a_live_one(
    machine: Machine, nvml: Nvml, folder: Path, start: Start
) -> None:
    owner = start(OWNER)
    assert [done.outcome for done in recover(nvml, folder)] == ["held"]
    owner.kill()
    owner.wait()
    assert [done.outcome for done in recover(nvml, folder)] == ["restored"]
    assert (limits(machine), records(folder)) == ([300, 300], [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_guard_restores_when_the_one_it_holds_for_is_killed(
    machine: Machine, folder: Path, start: Start, number: signal.Signals
) -> None:
    actor = start(GUARDED)
    actor.send_signal(number)
    eventually(lambda: limits(machine) == [300, 300] and records(folder) == [])


def test_a_guard_restores_when_it_is_told_to_end(
    machine: Machine, folder: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    guard = Guard("test", folder)
    guard.want({gpu: Cap(watts=200)}, {gpu})
    os.kill(guard.pid, signal.SIGTERM)
    eventually(lambda: limits(machine) == [300, 300] and records(folder) == [])
    with pytest.raises(GuardLost):
        guard.want({}, set())
    # Killed outright, it leaves a record, which the next one undoes as it starts.
    guard = Guard("test", folder)
    guard.want({gpu: Cap(watts=200)}, {gpu})
    os.kill(guard.pid, signal.SIGKILL)
    with pytest.raises(GuardLost):
        guard.want({}, set())
    assert limits(machine) == [200, 300]
    with Guard("test", folder):
        assert limits(machine) == [300, 300]


def test_a_guard_says_what_holds_and_what_was_refused(
    machine: Machine, folder: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    other = machine.gpus[1]
    other.denied = 1
    both = {gpu, other.id}
    with Guard("test", folder) as guard:
        outcome = guard.want({gpu: Cap(fraction=2 / 3), other.id: Cap(watts=200)}, both)
        assert outcome.applied_w == {gpu: 200}
        assert outcome.reasons == {other.id: "NoPermission"}
        assert "CAP_SYS_ADMIN" in outcome.refused[other.id]
        # A replica has gone: nobody of ours uses the GPU any more.
        outcome = guard.want({gpu: Cap(fraction=2 / 3)}, {other.id})
        assert outcome.reasons == {gpu: "CapRefused"}
        assert limits(machine) == [300, 300]
        other.denied = 0
        assert guard.want({other.id: Cap(watts=200)}, both).applied_w == {other.id: 200}
        assert limits(machine) == [300, 200]
    assert limits(machine) == [300, 300]
