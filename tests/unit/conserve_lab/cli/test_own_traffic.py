"""`conserve plan --from` checks the simulator against a recording, and plans for it."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from autoscale.capacity.profile import Profile, load_profile
from conserve_lab.cli import own_traffic
from conserve_lab.cli.own_traffic import Recorded, export_weka
from conserve_lab.cli.plan import cli
from conserve_lab.simulate.system import SimulationError
from conserve_lab.workloads.recorded import recorded_sessions
from conserve_lab.workloads.recordings import RecordingFile
from conserve_lab.workloads.traces import RecordedSession
from tests.unit.conserve_lab.workloads.test_recordings import SYSTEM, page, prompt, turn, written


def a_recording(path: Path, profile: str | None = "cpu-embedded") -> Path:
    """Record eight sessions of four turns, each of which a child answers one."""
    turns = []
    for number in range(8):
        at, name = 100.0 + 2 * number, f"s{number}"
        for place in range(4):
            asked = prompt(600 + 200 * place, number + 1)
            last = {"tool": "", "ttfet_s": 9.5} if place == 3 else {"tool": "ls"}
            found = {"decoder_cached_tokens": max(0, len(asked) - 200) if place else 0}
            turns.append(turn(at, asked, name, **last, **found))
            at += 3.0
        turns.append(turn(101.2 + 2 * number, prompt(300, 99), f"c{number}", parent=name))
    file, told = RecordingFile(path, 10**7), page(*sorted(turns, key=lambda one: one["at"]))
    told["model"], told["deployment"]["profile"] = "conserve-embedded", profile
    engines = [[role, True, 50_000, 100_000] for role in ("prefiller", "decoder")]
    told["deployment"] |= {"engines": [*engines, engines[1]], "nodes": 2}
    file.write(told)
    file.close()
    return path


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments)


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_the_simulator_is_compared_with_what_was_recorded(tmp_path: Path) -> None:
    path, out = a_recording(tmp_path / "r"), tmp_path / "out"
    done = run("--from", str(path), "--out", str(out), "--profile", "a40-qwen3-0.6b")
    assert done.exit_code == 0, done.output
    said = words(done)
    assert "40 turns of 8 sessions in 24 s" in said
    seen = Recorded(path, skip_bad=False)
    assert {name: value for name, (value, _) in seen.seen().figures().items()} == {
        "TTFT p50": 0.25, "TTFT p95": 0.25, "TTFET p50": 9.5, "TTFET p95": 9.5,
        "output tokens a second": pytest.approx(400 / 24),
        "prompt tokens found": pytest.approx(2400 / (3600 + 300)),
    }  # fmt: skip
    assert "TTFET p50 9.500 s" in said
    rows = ("today: 1 + 2", "one decoder more", "one decoder fewer", "on a40-qwen3-0.6b")
    assert [row for row in rows if row in said] == [*rows]
    assert "KV of a decoder 50,000 tokens" in said
    assert "sessions that arrive 0.333333 a second" in said
    assert {one.name for one in out.iterdir()} == {
        f"own-{metric}.{kind}" for metric in ("ttft", "ttfet") for kind in ("png", "svg")
    }


def test_every_node_has_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, make_system = a_recording(tmp_path / "r"), Mock(side_effect=SimulationError)
    monkeypatch.setattr(own_traffic, "make_system", make_system)
    for nodes in (2, 1):
        with pytest.raises(SimulationError):
            Recorded(path, skip_bad=False).simulated(load_profile("cpu-embedded"), 1, 2)
        assert make_system.call_args.kwargs["host_tokens"] == nodes * 100_000
        # Older recordings do not say how many nodes there were.
        path.write_text(path.read_text().replace(',"nodes":2', ""))


def test_more_engines_are_no_slower_and_a_faster_profile_is_faster(tmp_path: Path) -> None:
    seen = Recorded(a_recording(tmp_path / "r"), skip_bad=False)
    here, there = load_profile("cpu-embedded"), load_profile("a40-qwen3-0.6b")

    def ttft_s(*engines: int, profile: Profile = here) -> float:
        return seen.simulated(profile, *engines).figures()["TTFT p95"][0]

    assert ttft_s(1, 3) <= ttft_s(1, 1) * 1.05
    assert ttft_s(1, 2, profile=there) < ttft_s(1, 2) / 2


def told(session: RecordedSession) -> list[Any]:
    """Return what an export has of calls; it names no tools."""
    return [
        (round(one.started_s, 3), one.took_s, one.prompt_tokens, one.output_tokens, one.kept_blocks,
         len(one.new_blocks), one.head_blocks, one.effective, one.tool and "?")
        for one in session.calls
    ]  # fmt: skip


def test_sessions_are_exported_as_aiperf_reads_them(tmp_path: Path) -> None:
    path, out = a_recording(tmp_path / "r"), tmp_path / "out"
    done = run("--from", str(path), "--out", str(out), "--export", "weka")
    assert done.exit_code == 0, done.output
    own = {one.name: one for one in (read() for read in recorded_sessions(path).values())}
    exported = [read() for read in recorded_sessions(out / "weka").values()]
    assert {one.name for one in exported} == own.keys()
    for session in exported:
        (sub,), of = session.sub_agents, own[session.name]
        for one, other in ((session, of), (sub.session, of.sub_agents[0].session)):
            assert told(one) == told(other)
        assert (sub.after, sub.started_s, sub.ended_s) == pytest.approx((0, 1.2, 2.2))


def test_what_aiperf_does_not_know_is_not_exported(tmp_path: Path) -> None:
    """AIPerf 0.13 refuses a field that it does not know, and sub-agents of sub-agents."""
    path, child = tmp_path / "r", turn(102.0, prompt(300, 1), "b", parent="a")
    written(path, turn(99.0, SYSTEM), child, turn(103.0, prompt(300, 2), "c", parent="b"),
            turn(110.0, prompt(500, 1)))  # fmt: skip
    export_weka(Recorded(path, skip_bad=False), tmp_path / "weka")
    (session,) = (json.loads(one.read_text()) for one in (tmp_path / "weka").iterdir())
    call, *subs, later = session["requests"]
    # Others begin with 256 tokens, but the first prompt has 200.
    assert (session["system_tokens"], subs[0]["system_tokens"], later["t"]) == (192, 256, 11.0)
    assert [call["t"], *(one["t"] for sub in subs for one in sub["requests"])] == [0.0, 3.0, 4.0]
    assert {" ".join(one) for one in (call, *subs, *subs[0]["requests"])} == {
        "t type model in out hash_ids stop api_time",
        "models system_tokens requests t type agent_id duration_ms status subagent_type",
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "the recording names no profile; give that of its engines: --profile"),
        (("--profile", "a40-qwen3-0.6b"), "is of the model Qwen/Qwen3-0.6B, but conserve-embedded"),
        (("--workload", "synthetic"), "--workload does not go with --from"),
        (("--export", "csv"), "--export csv: give weka, with --from FILE and --out FOLDER"),
    ],
)
def test_what_does_not_go_together_is_said(
    tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    path = a_recording(tmp_path / "r", profile=None)
    done = run("--from", str(path), *arguments)
    assert (done.exit_code, problem in words(done)) == (2, True), done.output
