"""The comparison at the papers' scale, in small."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate.run import EngineCounts
from experiments import scale as command
from experiments.scale import CLOSED, CONTENDERS, REGIMES, Figures, Run, claims, measure

_LABELS = {one.label: one for one in CONTENDERS}


def _figures(scene: str, system: str, load: float, **more: float) -> Figures:
    seen = {"steps_per_min": 100.0, "program_s": 60.0} | more
    return Figures(scene, system, load, 1.0, seen["steps_per_min"], 0.5, 1.0, 0.5,
                   seen["program_s"], 0, 0, ())  # fmt: skip


def test_a_closed_loop_counts_what_ended_after_its_first_third() -> None:
    scene = replace(CLOSED[0], seconds=300.0)
    run = Run(scene, _LABELS["affinity"], 4, EngineCounts(1, 3), None, 0)
    one = measure(run)
    assert (one.scene, one.system, one.load) == ("quick tools", "affinity", 4)
    # Four that are never in each other's way: a turn takes two or three seconds, tools included.
    assert 4 * 60 / 5 < one.steps_per_min < 4 * 60 / 1.5
    assert one.found > 0.99
    assert (one.failed, one.preemptions, len(one.busy)) == (0, 0, 4)
    assert all(0 <= share < 1 for share in one.busy)


def test_conserve_has_as_many_engines_and_host_memory_by_their_number() -> None:
    regime = replace(REGIMES[0], programs=3)
    run = Run(regime, _LABELS["parking, 256 GB"], 0.1, EngineCounts(1, 1), None, 0)
    one = measure(run)
    assert len(one.busy) == 2
    assert one.program_s is not None
    assert one.latency_s < one.program_s


def test_on_one_engine_each_system_has_one() -> None:
    regime = replace(REGIMES[0], programs=3)
    for one in CONTENDERS:
        assert len(measure(Run(regime, one, 0.1, EngineCounts(0, 1), None, 0)).busy) == 1


def test_regimes_prompts_add_up_to_what_mars_says() -> None:
    for regime, volume_tokens in zip(REGIMES, (125e3, 167e3, 220e3, 263e3), strict=True):
        total = 0
        for _, script in replace(regime, programs=100).workload(1.0, 0):
            while (request := script.next(None)) is not None:
                total += request.prompt_tokens or 0
        assert total / 100 == pytest.approx(volume_tokens, rel=0.15), regime.name


def test_claims_are_ratios_of_what_was_simulated() -> None:
    found = [
        _figures("quick tools", "vllm", 96, steps_per_min=100.0),
        _figures("quick tools", "thunderagent", 96, steps_per_min=150.0),
        _figures("quick tools", "parking", 96, steps_per_min=75.0),
        _figures("ILR-1", "vllm", 0.5, program_s=90.0),
        _figures("ILR-1", "attained", 0.5, program_s=60.0),
        _figures("ILR-1", "pausing", 0.5, program_s=40.0),
    ]
    by = {one.what: one for one in claims(found) if one.ratios}
    serving = by["ThunderAgent over vLLM, 96 programs"]
    assert serving.ratios == {"quick tools": 1.5}
    assert (serving.comes_out, serving.simulated) == ("1 of 1", "1.50 (quick tools)")
    own = by["parking over the best of the others, 96 programs"]
    assert own.ratios == {"quick tools": 0.5}
    assert own.comes_out == "0 of 1"
    mars = next(one for what, one in by.items() if what.startswith("pausing: programs"))
    assert mars.ratios == {"ILR-1 at 0.5/s": 1.5}
    assert not any("rollout" in what for what in by)


def test_the_command_prints_every_system_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CLOSED", (replace(CLOSED[0], seconds=60.0),))
    monkeypatch.setattr(command, "REGIMES", (replace(REGIMES[0], programs=2),))
    monkeypatch.setattr(command, "CONTENDERS", (_LABELS["vllm"], _LABELS["parking"]))
    command.main(["--programs", "2,3", "--rates", "0.5", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert output.count("parking") >= 3
    rows = json.loads((tmp_path / "scale.json").read_text())
    assert [(row["system"], row["load"]) for row in rows] == [
        ("vllm", 2), ("parking", 2), ("vllm", 3), ("parking", 3), ("vllm", 0.5), ("parking", 0.5),
    ]  # fmt: skip
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_the_sweep_shows_each_interval_and_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CLOSED", (replace(CLOSED[0], seconds=60.0), CLOSED[2]))
    command.main(["--sweep", "4", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert all(one.label in output for one in command.SWEEP)
    rows = json.loads((tmp_path / "scale.json").read_text())
    assert {row["scene"] for row in rows} == {"quick tools"}


@pytest.mark.parametrize("text", ["", "a", "-1", "1,,2"])
def test_numbers_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([f"--programs={text}"])
    assert "give numbers from 0" in capsys.readouterr().err
