"""Power caps are put back whatever ends their owner, and refused where they are not ours."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hetero.guard import Guard, GuardLost
from hetero.nvml import GpuLost, NoPermission, Nvml, PowerLimits
from hetero.power import Cap, CapRefused, HasOwner, PowerCaps, Record, recover
from tests.checkout import ROOT
from tests.nvml.standin import Machine

PATIENCE_S = 60.0


class Rig:
    """Two A40s, of which the first is capped, and the folder of records."""

    def __init__(self, machine: Machine, nvml: Nvml, folder: Path) -> None:
        self.machine, self.nvml, self.folder = machine, nvml, folder
        self.first, self.second = machine.gpus
        self.gpu = self.first.id

    @property
    def limits(self) -> list[int]:
        """What the stand-in's state says, in watts."""
        return [gpu.limit_mw // 1000 for gpu in self.machine.gpus]

    @property
    def records(self) -> list[Record]:
        paths = sorted(self.folder.glob("*.json"))
        return [Record(**json.loads(path.read_text())) for path in paths]

    @property
    def is_as_found(self) -> bool:
        return self.limits == [300, 300] and self.records == []

    def caps(self, owner: str = "test") -> PowerCaps:
        return PowerCaps(self.nvml, owner, self.folder)

    def cap(self, caps: PowerCaps, watts: float) -> float:
        return caps.apply(self.gpu, Cap(watts=watts), {self.gpu})

    def recovered(self) -> list[str]:
        return [done.outcome for done in recover(self.nvml, self.folder)]

    def assert_untouched(self) -> None:
        assert self.is_as_found
        assert [gpu.set_calls for gpu in self.machine.gpus] == [0, 0]


@pytest.fixture
def rig(machine: Machine, nvml: Nvml, tmp_path: Path) -> Rig:
    return Rig(machine, nvml, tmp_path / "power")


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# --- what a cap may be -------------------------------------------------------------------------

A40 = PowerLimits(default_w=300, min_w=100, max_w=300)


def test_a_cap_is_in_watts_or_a_fraction_of_the_default() -> None:
    assert Cap(watts=200).limit_w(A40) == 200
    assert Cap(fraction=2 / 3).limit_w(A40) == 200  # The paper's A40 (§5.5).
    assert Cap(fraction=0.5).limit_w(PowerLimits(345.7, 100, 400)) == 172.8


# --- in one process ----------------------------------------------------------------------------


def test_it_is_put_back_at_the_end_even_after_an_exception(rig: Rig) -> None:
    rig.first.limit_mw = 250_000  # The limit before the cap, which is not the default.

    def fail() -> None:
        with rig.caps() as caps:
            assert rig.cap(caps, 200) == 200
            assert rig.limits == [200, 300]
            (record,) = rig.records
            assert (record.previous_w, record.caps_w) == (250, [200])
            # Another value of the same owner's; what to put back stays what was found.
            assert caps.apply(rig.gpu, Cap(fraction=0.5), {rig.gpu}) == 150
            assert rig.limits == [150, 300]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (rig.limits, rig.records) == ([250, 300], [])


def test_the_limit_that_was_found_is_on_disk_before_it_changes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = []
    change = rig.nvml.set_limit_w

    def look_first(uuid: str, limit_w: float) -> None:
        (record,) = rig.records
        on_disk.append((record.previous_w, record.caps_w))
        change(uuid, limit_w)

    monkeypatch.setattr(rig.nvml, "set_limit_w", look_first)
    caps = rig.caps()
    rig.cap(caps, 200)
    rig.cap(caps, 150)
    # Beside the old cap, which holds if this process ends before the limit changes.
    assert on_disk == [(300, [200]), (300, [200, 150])]
    assert [done.outcome for done in caps.restore_all()] == ["restored"]


@pytest.mark.parametrize(
    "cap", [Cap(watts=99.9), Cap(fraction=0.1), Cap(watts=300.1), Cap(watts=-5)]
)
def test_a_cap_outside_the_constraints_changes_nothing(rig: Rig, cap: Cap) -> None:
    with rig.caps() as caps, pytest.raises(CapRefused, match=r"outside.*100 to 300 W"):
        caps.apply(rig.gpu, cap, {rig.gpu})
    rig.assert_untouched()


def test_a_gpu_that_is_not_ours_is_not_touched(rig: Rig) -> None:
    with rig.caps() as caps, pytest.raises(CapRefused, match="no replica of ConServe uses"):
        caps.apply(rig.gpu, Cap(watts=200), {rig.second.id})
    rig.assert_untouched()


def test_a_gpu_in_mig_mode_is_not_touched(rig: Rig) -> None:
    first = rig.first
    first.unsupported, first.mig_enabled, first.mig_devices, first.mig_sms = 0, 1, 2, 42
    with rig.caps() as caps, pytest.raises(CapRefused, match="MIG"):
        rig.cap(caps, 200)
    rig.assert_untouched()


def test_a_second_owner_is_refused(rig: Rig) -> None:
    with rig.caps("the first") as first:
        rig.cap(first, 200)
        calls = rig.first.set_calls
        second = rig.caps("second")
        with pytest.raises(HasOwner, match=f"the first .process {os.getpid()}"):
            rig.cap(second, 150)
        assert second.restore_all() == []
        assert (rig.recovered(), rig.limits) == (["held"], [200, 300])
        assert rig.first.set_calls == calls
    assert rig.limits == [300, 300]


def test_without_permission_nothing_is_left_behind(rig: Rig) -> None:
    rig.first.denied = 1
    with rig.caps() as caps:
        with pytest.raises(NoPermission, match="CAP_SYS_ADMIN"):
            rig.cap(caps, 200)
        assert caps.held == []
    assert rig.is_as_found


def test_a_record_that_cannot_be_written_keeps_the_limit_as_it_is(rig: Rig) -> None:
    (rig.folder / f"{rig.gpu}.new").mkdir(parents=True)
    with rig.caps() as caps, pytest.raises(OSError, match="directory"):
        rig.cap(caps, 200)
    rig.assert_untouched()


def test_a_limit_that_somebody_else_set_since_is_left(rig: Rig) -> None:
    caps = rig.caps()
    rig.cap(caps, 200)
    rig.first.limit_mw = 220_000
    (done,) = caps.restore_all()
    assert (done.outcome, rig.limits, rig.records) == ("changed", [220, 300], [])


def test_a_gpu_that_is_lost_meanwhile_is_restored_when_it_is_back(rig: Rig) -> None:
    caps = rig.caps()
    rig.cap(caps, 200)
    rig.first.lost = 1
    assert [done.outcome for done in caps.restore_all()] == ["failed"]
    with pytest.raises(GpuLost):
        rig.cap(caps, 150)
    rig.first.lost = 0
    assert rig.recovered() == ["restored"]
    assert rig.is_as_found


def test_what_a_killed_owner_leaves_is_put_back(rig: Rig) -> None:
    """It was killed between writing its record and setting the limit."""
    rig.folder.mkdir()
    file = rig.folder / f"{rig.gpu}.json"
    record = {"uuid": rig.gpu, "previous_w": 300, "caps_w": [200], "owner": "x", "pid": 1}
    file.write_text(json.dumps({**record, "since_s": 0}))
    assert rig.recovered() == ["restored"]
    rig.assert_untouched()
    # And between one cap and another.
    file.write_text(json.dumps({**record, "since_s": 0, "caps_w": [200, 150]}))
    rig.first.limit_mw = 200_000
    assert rig.recovered() == ["restored"]
    assert rig.limits == [300, 300]
    # The next owner puts back what this one found, not what it left.
    file.write_text(json.dumps({**record, "since_s": 0}))
    rig.first.limit_mw = 200_000
    with rig.caps("next") as caps:
        rig.cap(caps, 150)
        assert rig.records[0].previous_w == 300
    assert rig.limits == [300, 300]


def test_a_record_that_cannot_be_read_is_kept_and_does_not_hinder_others(rig: Rig) -> None:
    other = rig.second.id
    rig.caps().apply(other, Cap(watts=200), {other})
    (rig.folder / f"{rig.gpu}.json").write_text("{")
    outcomes = {done.uuid: done for done in recover(rig.nvml, rig.folder)}
    assert (outcomes[other].outcome, outcomes[rig.gpu].outcome) == ("restored", "failed")
    assert "nvidia-smi -q -d POWER" in outcomes[rig.gpu].detail
    assert (rig.folder / f"{rig.gpu}.json").exists()


# --- processes that end ------------------------------------------------------------------------

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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_guard_restores_when_the_one_it_holds_for_is_killed(
    rig: Rig, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(rig.folder), rig.gpu],
        cwd=ROOT, env=rig.machine.environment(), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("capped")
            assert rig.limits == [200, 300]
            process.send_signal(number)
            eventually(lambda: rig.is_as_found)
        finally:
            process.kill()


@pytest.fixture
def guarded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """The rig, whose GPUs guards of this process see."""
    for name, value in rig.machine.environment().items():
        monkeypatch.setenv(name, value)
    return rig


def test_a_guard_restores_when_it_is_told_to_end(guarded: Rig) -> None:
    gpu, folder = guarded.gpu, guarded.folder
    guard = Guard("test", folder)
    guard.want({gpu: Cap(watts=200)}, {gpu})
    os.kill(guard.pid, signal.SIGTERM)
    eventually(lambda: guarded.is_as_found)
    with pytest.raises(GuardLost):
        guard.want({}, set())
    # Killed outright, it leaves a record, which the next one undoes as it starts.
    guard = Guard("test", folder)
    guard.want({gpu: Cap(watts=200)}, {gpu})
    os.kill(guard.pid, signal.SIGKILL)
    with pytest.raises(GuardLost):
        guard.want({}, set())
    assert guarded.limits == [200, 300]
    with closing(Guard("test", folder)):
        assert guarded.limits == [300, 300]


def test_a_guard_says_what_holds_and_what_was_refused(guarded: Rig) -> None:
    gpu, other = guarded.gpu, guarded.second
    other.denied = 1
    both = {gpu, other.id}
    with closing(Guard("test", guarded.folder)) as guard:
        outcome = guard.want({gpu: Cap(fraction=2 / 3), other.id: Cap(watts=200)}, both)
        assert outcome.applied_w == {gpu: 200}
        assert outcome.reasons == {other.id: "NoPermission"}
        assert "CAP_SYS_ADMIN" in outcome.refused[other.id]
        # A replica has gone: nobody of ours uses the GPU any more.
        outcome = guard.want({gpu: Cap(fraction=2 / 3)}, {other.id})
        assert outcome.reasons == {gpu: "CapRefused"}
        assert guarded.limits == [300, 300]
        other.denied = 0
        assert guard.want({other.id: Cap(watts=200)}, both).applied_w == {other.id: 200}
        assert guarded.limits == [300, 200]
    assert guarded.limits == [300, 300]
