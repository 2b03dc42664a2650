"""The energy benchmark: its model does all the work, and its rig loses no joule."""

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.selection import Selection
from experiments.energy.__main__ import SETUPS, gains, modelled_j, run
from experiments.energy.model import Machine, Speed
from experiments.energy.rig import Draw, Rig
from tests.nvml import standin

FEW = Selection("synthetic", 6, rate_per_s=2.0)


def test_every_turn_is_answered_and_counted_once() -> None:
    machine = Machine(Speed(), Speed(), decoders=2)
    busy: Counter[str] = Counter()
    for _, steps in machine.run(FEW.workload()):
        for name, step in steps.items():
            assert 0 <= step.prefill_s + step.decode_s <= 0.05 + 1e-9
            busy[name] += step.prefill_s + step.decode_s
    outcome = machine.outcome
    turns = FEW.workload().counts["turns"]
    assert len(outcome.turn_s) == turns
    assert len(outcome.ttft1_s) == 6
    first_prompts = decoders = 0
    for _, script in FEW.workload():
        held = None
        while (request := script.next(None)) is not None:
            assert request.prompt_tokens is not None
            assert request.output_tokens is not None
            if held is None:
                # What is no whole chunk is not handed over.
                first_prompts += request.prompt_tokens
                held = request.prompt_tokens // 256 * 256
            # The prefill puts the first token out.
            decoders += request.prompt_tokens - held // 16 * 16 + request.output_tokens - 1
            held = request.prompt_tokens
    assert outcome.computed_tokens["prefiller-0"] == first_prompts
    assert outcome.computed_tokens["decoder-0"] + outcome.computed_tokens["decoder-1"] == decoders
    # 25,000 prompt tokens a second, and no faster than the steps let it.
    assert outcome.busy["prefiller-0"].prefill_s == pytest.approx(first_prompts / 25_000)
    for name, seconds in busy.items():
        assert seconds == pytest.approx(outcome.busy[name].prefill_s + outcome.busy[name].decode_s)


def test_slower_prefills_take_longer() -> None:
    fast, slow = (Machine(speed, Speed(), decoders=1) for speed in (Speed(), Speed(2.0)))
    for machine in (fast, slow):
        for _ in machine.run(FEW.workload()):
            pass
    fast_s, slow_s = (one.outcome.busy["prefiller-0"].prefill_s for one in (fast, slow))
    assert slow_s == pytest.approx(2 * fast_s)
    assert max(slow.outcome.ttft1_s) > max(fast.outcome.ttft1_s)


def test_the_rig_caps_meters_and_puts_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the rig sets for its processes is undone afterwards.
    for name in ("PYTHONPATH", standin.VARIABLE):
        monkeypatch.setenv(name, "")
    rig = Rig(tmp_path)
    draw = Draw(decode_w=280.0)
    with Progress(console=Console(quiet=True)) as progress:
        homogeneous, heterogeneous = (run(setup, FEW, draw, rig, progress) for setup in SETUPS[:2])
    assert homogeneous.accounted.limits_w == {"prefill": 300, "decode": 300}
    assert heterogeneous.accounted.limits_w == {"prefill": 300, "decode": 200}
    for one in (homogeneous, heterogeneous):
        seen = one.accounted
        assert seen.after_w == {300.0}
        assert seen.total_j == pytest.approx(seen.true_j, rel=0.005)
        # What the meter says is what the model's busy seconds come to.
        assert seen.total_j == pytest.approx(modelled_j(one.outcome, draw, one.setup), rel=0.005)
        computed = sum(one.outcome.computed_tokens.values())
        assert seen.tokens_per_j == pytest.approx(computed / seen.total_j, rel=0.005)
    assert heterogeneous.accounted.total_j < homogeneous.accounted.total_j
    same = heterogeneous.accounted.role_j["prefiller"]
    assert same == pytest.approx(homogeneous.accounted.role_j["prefiller"], rel=0.01)
    runs = [homogeneous, heterogeneous]
    (_, less), (_, more) = gains(runs, [Draw(decode_w=220.0), draw])
    assert 0 < less < more
