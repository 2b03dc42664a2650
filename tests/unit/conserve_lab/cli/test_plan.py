from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from conserve_lab.cli import plan as module
from conserve_lab.cli.plan import cli, planned_turns
from conserve_lab.cli.simulate import cli as simulate
from conserve_lab.workloads import PRESETS, Arrivals, Workload, recorded, synthetic
from tests.checkout import DATA

TRACES = DATA / "claude-code-traces"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--profile", "a40-qwen3-0.6b", *arguments])


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_one_conversation_like_the_papers_gives_the_papers_numbers() -> None:
    done = run(
        "--turns", "1", "--first-tokens", "15000", "--output-tokens", "1000",
        "--rate", "1.634", "--prefill-headroom", "0", "--conversations", "3",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "T_p 25,000 input tokens/s" in words(done)
    assert "R* = T_p / L_in 1.667 conversations/s" in words(done)
    assert "At 1.634 conversations/s: 1 prefiller, 3 decoders" in words(done)


def test_a_profile_of_another_kind_of_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(profile: str) -> bool:
        done = CliRunner().invoke(cli, ["--profile", profile, "--conversations", "20"])
        return f"profile {profile} is of a CPU with kernels for bfloat16" in words(done)

    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert named("cpu-embedded")
    assert not named("a40-qwen3-0.6b")


def test_rates_of_recorded_sessions_are_planned_with_their_sub_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `conserve simulate` and `conserve bench` take the rate."""
    made = synthetic(
        PRESETS["conserve"], conversations=20, arrivals=Arrivals(), vocabulary=range(2)
    )
    plain = run("--conversations", "20", "--rate", "1.25")
    sessions = Workload("recorded", {**made.counts, "sessions": 8}, lambda: iter(made))
    monkeypatch.setattr(module, "_workload", lambda *arguments: sessions)
    done = run("--rate", "0.5")
    assert done.exit_code == 0, done.output
    assert "recorded sessions 8" in words(done)
    assert "conversations a session, sub-agents' included 2.5" in words(done)
    assert "sessions that arrive 0.5 a second" in words(done)
    assert "so, conversations that arrive 1.25 a second" in words(done)
    assert "At 1.25 conversations/s: " in words(done)
    last = plain.output.splitlines()[-2:]
    assert done.output.splitlines()[-2:] == last
    assert "recorded sessions" not in words(plain)


def stages(*arguments: str) -> Result:
    return run("--profile", "a6000-cogagent", "--stages", *arguments)


def test_stages_are_planned_as_in_the_paper() -> None:
    done = stages()
    assert done.exit_code == 0, done.output
    assert "encode 24 12 4 prefill 30 12 6" in words(done)
    rows = [line.split() for line in done.output.splitlines()]
    assert ["1", "24", "30", "3.08", "s", "0.612", "28.9", "ms"] in rows
    # On the front are the divisions of each number of pending requests.
    for pending, sides in enumerate((["24", "30"], ["20", "24"], ["16", "18"], ["12", "12"]), 1):
        assert [row[-1] for row in rows if row[:2] == sides and len(row) == 8] == [str(pending)]
    assert "at up to 0.612 requests/s" in words(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "nope"], "profile nope cannot be read"),
        (["--first-tokens", "400000"], "no number of decoders serves it"),
        (["--first-tokens", "many"], "--first-tokens many: write LOW:MEAN:HIGH"),
        (["--stages"], "--conversations does not go with --stages"),
        (["--workload", "agents"], "its lengths are not known before it runs"),
        (["--workload", "recorded", "--data", ".", "--turns", "3"], "for the workload synthetic"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(arguments: list[str], said: str) -> None:
    refused = run("--conversations", "5", *arguments)
    assert refused.exit_code == 2
    assert said in words(refused)
    assert len(refused.output.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [cli, simulate])
def test_what_traces_do_not_say_and_what_is_skipped_is_said(tmp_path: Path, command: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"messages": [{"role": "user", "content": "Hello."}]}\nnothing\n')
    arguments = ["--workload", "recorded", "--data", str(trace), "--conversations", "3"]
    done = CliRunner().invoke(command, ["--profile", "a40-qwen3-0.6b", *arguments, "--skip-bad"])
    assert done.exit_code == 0, done.output
    assert "Skipped lines or files: 1; " in words(done)
    assert "Assumed: 4 bytes of text for a token (--tokenizer counts them)." in words(done)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no recorded sessions at {DATA}")
def test_turns_are_those_that_bench_sends() -> None:
    session = min(TRACES.rglob("*.json*"))
    workload = recorded(session, sessions=2, arrivals=Arrivals(), vocabulary=range(1000, 4000))
    planned = list(planned_turns(workload))
    assert len(planned) == workload.counts["conversations"]
    for (_, script), turns in zip(workload, planned, strict=True):
        for turn in turns:
            request = script.next(None)
            assert request is not None
            assert turn.new_tokens + turn.cached_tokens == request.prompt_tokens
            assert turn.cached_tokens == request.reused_tokens
            assert turn.output_tokens == request.output_tokens
