"""``conserve bench`` as a user calls it, against an endpoint that counts."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from conserve_lab.cli.bench import cli
from conserve_lab.records import TurnRecord
from conserve_lab.report import read_report
from tests.checkout import DATA
from tests.unit.conserve_lab.stub import Behaviour, Stub, hang, refuse, served

# Quick: short prompts, no waiting.
QUICK = ["--scale-tokens", "0.01", "--scale-gaps", "0", "--arrivals", "together", "--no-plots"]


def _records(path: Path) -> list[TurnRecord]:
    return msgspec.json.Decoder(TurnRecord).decode_lines(path.read_bytes())


def _bench(*arguments: str | Path) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], env=environment)


@contextmanager
def _interrupted(when: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C at that time."""

    def interrupt() -> None:
        while not when():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join(10)


def _refused(*arguments: str | Path) -> str:
    """The one line that a wrong call gets."""
    result = _bench("run", *arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_one_endpoint(tmp_path: Path) -> None:
    with served(Stub()) as stub:
        result = _bench(
            "run", f"stub={stub.url}", *QUICK, "--conversations", "4", "--unloaded", "2",
            "--out", tmp_path, "--parquet", "--conversation-header", "x-session-id",
            "--header", "Authorization: Bearer secret",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "TTFET" in result.output
    report = read_report(tmp_path / "stub.json")
    assert report.result.conversations == {"completed": 4}
    assert report.objectives is not None
    assert report.unloaded is not None
    assert len(report.unloaded.served_s) == 2
    assert set(report.unloaded.served_s) < set(report.samples["e2e"])
    assert report.workload["kind"] == "synthetic"
    assert report.workload["counts"]["conversations"] == 4
    assert "secret" not in (tmp_path / "stub.json").read_text()

    records = _records(tmp_path / "records.jsonl")
    assert len(records) == sum(report.result.turns.values())
    # Two of the four ran alone before, as other conversations in another part of the caches.
    salts = {seen.body["cache_salt"] for seen in stub.turns}
    assert len(salts) == 2
    assert len({seen.headers["x-session-id"] for seen in stub.turns}) == 6
    assert not any("X-Conversation-Id" in seen.headers for seen in stub.turns)
    assert {seen.headers["Authorization"] for seen in stub.turns} == {"Bearer secret"}
    assert (tmp_path / "records.parquet").stat().st_size > 0


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no recordings at {DATA}")


@needs_data
def test_recorded_sessions(tmp_path: Path) -> None:
    with served(Stub()) as stub:
        result = _bench(
            "run", f"stub={stub.url}", "--workload", "recorded",
            "--data", DATA / "claude-code-traces", "--conversations", "1",
            "--scale-tokens", "0.05", "--max-gap", "0",
            "--max-context-tokens", "8000", "--arrivals", "together", "--no-plots",
            "--unloaded", "0", "--no-cache-salt", "--no-release", "--out", tmp_path,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = _records(tmp_path / "records.jsonl")
    first = records[0].conversation
    planned = [record.prompt_tokens for record in records if record.conversation == first]
    sent = [
        len(seen.body["prompt"])
        for seen in stub.turns
        if seen.headers["X-Conversation-Id"].endswith(first)
    ]
    assert planned == sent
    assert len(planned) > 1
    assert not any("cache_salt" in seen.body for seen in stub.turns)
    assert stub.released == []
    assert read_report(tmp_path / "stub.json").objectives is None


@needs_data
def test_recorded_dialogues(tmp_path: Path) -> None:
    with served(Stub()) as stub:
        result = _bench(
            "run", f"stub={stub.url}", "--workload", "dialogues",
            "--data", DATA / "tau-bench/gpt-4o-airline.json.gz", "--conversations", "2",
            "--mean-gap", "0", "--max-output-tokens", "3", "--arrivals", "together", "--no-plots",
            "--unloaded", "0", "--out", tmp_path,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = read_report(tmp_path / "stub.json")
    assert report.result.conversations == {"completed": 2}
    # Answers without tool calls are for the user, from the first one on.
    assert report.samples["ttfet"].keys() == report.samples["ttft_first"].keys()
    assert {seen.path for seen in stub.turns} == {"/v1/chat/completions"}
    says = [message["role"] for message in stub.turns[-1].body["messages"]]
    assert says[:2] == ["system", "user"]
    assert stub.turns[-1].body["messages"][2] == {"role": "assistant", "content": "xxx"}


def test_several_endpoints_alternate_and_compare(tmp_path: Path) -> None:
    with served(Stub()) as one, served(Stub()) as two:
        result = _bench(
            "run", f"a={one.url}", f"b={two.url}", *QUICK, "--conversations", "2", "--rounds", "3",
            "--unloaded", "1", "--out", tmp_path,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "b against a" in result.output
    a, b = (read_report(tmp_path / f"{name}.json") for name in "ab")
    assert a.result.turns == b.result.turns
    assert a.samples["e2e"].keys() == b.samples["e2e"].keys()
    assert {name.split("/")[0] for name in a.samples["e2e"]} == {"0", "1", "2"}
    assert a.objectives == b.objectives

    compared = _bench(
        "compare", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "pictures"
    )
    assert compared.exit_code == 0, compared.output
    assert "3 rounds" in " ".join(compared.output.split())
    assert (tmp_path / "pictures/cdf-ttft.png").exists()


def test_an_earlier_reference_is_used(tmp_path: Path) -> None:
    with served(Stub()) as stub:
        call = ["run", f"s={stub.url}", *QUICK, "--conversations", "2", "--seed"]
        assert _bench(*call, "0", "--unloaded", "0", "--out", tmp_path / "none").exit_code == 0
        assert _bench(*call, "1", "--unloaded", "1", "--out", tmp_path / "given").exit_code == 0
        before = len(stub.turns)
        reference = ["--reference", tmp_path / "given/s.json", "--slo-multiple", "10"]
        assert _bench(*call, "1", *reference, "--out", tmp_path / "same").exit_code == 0
        assert len(stub.turns) - before == len(_records(tmp_path / "same/records.jsonl"))
        assert _bench(*call, "2", *reference, "--out", tmp_path / "other").exit_code == 0
        refused = _bench(*call, "2", "--reference", tmp_path / "none/s.json", "--out", tmp_path)
    given, same, other = (read_report(tmp_path / f"{n}/s.json") for n in ("given", "same", "other"))
    assert given.objectives is not None
    twice = {metric: 2 * bound_s for metric, bound_s in given.objectives.bounds_s.items()}
    for report in (same, other):
        assert report.objectives is not None
        assert report.objectives.bounds_s == pytest.approx(twice)
    # Of other conversations, bounds are of use, times of single conversations are not.
    assert other.unloaded is not None
    assert other.unloaded.served_s == {}
    assert refused.exit_code == 2
    assert "was made without an unloaded run" in " ".join(refused.output.split())


def test_ctrl_c_still_reports(tmp_path: Path) -> None:
    with served(Stub()) as stub, _interrupted(lambda: len(stub.turns) == 3):
        # All first turns are sent; second ones wait for their tools for longer than any test.
        result = _bench(
            "run", f"s={stub.url}", "--scale-tokens", "0.01", "--scale-gaps", "10000",
            "--arrivals", "together", "--conversations", "3", "--no-plots", "--unloaded", "0",
            "--out", tmp_path,
        )  # fmt: skip
    assert result.exit_code == 130, result.output
    assert "stopped before all conversations had ended" in result.output
    report = read_report(tmp_path / "s.json")
    assert report.result.conversations == {"unfinished": 3}
    assert report.driver["interrupted"]
    assert len(stub.released) == 3


def test_ctrl_c_reports_the_whole_rounds(tmp_path: Path) -> None:
    def stick(body: dict[str, Any]) -> Behaviour | None:
        return hang if body["cache_salt"].startswith("1-") else None

    with served(Stub(choose=stick)) as one, served(Stub(choose=stick)) as two:

        def in_the_second_round() -> bool:
            return one.hanging.is_set() or two.hanging.is_set()

        with _interrupted(in_the_second_round):
            result = _bench(
                "run", f"a={one.url}", f"b={two.url}", *QUICK, "--conversations", "1",
                "--unloaded", "0", "--out", tmp_path,
            )  # fmt: skip
    assert result.exit_code == 130, result.output
    assert "the reports are of the whole rounds alone" in result.output
    for name in "ab":
        report = read_report(tmp_path / f"{name}.json")
        assert report.result.conversations == {"completed": 1}
    # What was seen of the second round is kept.
    outcomes = [record.outcome for record in _records(tmp_path / "records.jsonl")]
    assert outcomes.count("unfinished") == 1


def test_a_wrong_model(tmp_path: Path) -> None:
    with served(Stub()) as stub:
        result = _bench("run", stub.url, *QUICK, "--model", "wrong", "--out", tmp_path)
    assert result.exit_code == 1
    assert "HTTP 404: no such model" in result.output


def test_the_second_endpoint_is_missed_at_once(tmp_path: Path) -> None:
    with served(Stub()) as stub:
        result = _bench("run", f"a={stub.url}", "b=http://127.0.0.1:9", *QUICK, "--out", tmp_path)
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9" in result.output
    assert stub.turns == []


def test_refusals_after_the_reference_are_failures(tmp_path: Path) -> None:
    def refuse_load(body: dict[str, Any]) -> Behaviour | None:
        return None if body["cache_salt"].startswith("unloaded-") else refuse

    with served(Stub(choose=refuse_load)) as stub:
        result = _bench(
            "run", f"s={stub.url}", *QUICK, "--conversations", "2", "--unloaded", "1",
            "--out", tmp_path,
        )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "No turn was completed by s." in result.output
    assert "2 of 2 turns failed" in result.output
    report = read_report(tmp_path / "s.json")
    assert report.result.failures == {"HTTP 429": 2}
    assert set(report.result.violations.values()) == {1.0}
    assert report.result.goodput == {"1": 0.0, "2": 0.0, "3": 0.0}


def test_the_server_is_asked_what_it_handed_off(tmp_path: Path) -> None:
    stub = Stub()
    stub.counters = lambda: f"conserve_handoff_tokens_total {50 * len(stub.turns)}\n"
    with served(stub):
        result = _bench(
            "run", f"s={stub.url}", *QUICK, "--conversations", "2", "--unloaded", "1",
            "--kv-bytes-per-token", "1000", "--out", tmp_path,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = read_report(tmp_path / "s.json")
    tokens = 50 * sum(report.result.turns.values())
    assert report.result.server.handoff_tokens == tokens
    assert report.result.server.handoff_bytes == 1000 * tokens
    assert report.result.server.moves is None
    assert report.options["kv_bytes_per_token"] == 1000


def test_without_matplotlib_there_are_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = [option for option in QUICK if option != "--no-plots"]
    with served(Stub()) as stub:
        call = ["run", f"s={stub.url}", *quick, "--conversations", "1", "--unloaded", "0"]
        monkeypatch.delitem(sys.modules, "conserve_lab.plots", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        result = _bench(*call, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "pip install matplotlib" in result.output
    assert (tmp_path / "s.json").exists()


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rate", "-1"], "the arrival rate is -1 conversations/s; give one above 0"),
        (["--workload", "recorded", "--data", "nowhere"], "there is no such file or folder"),
        (["--mean-gap", "3"], "--mean-gap is for the workload dialogues or agents, not for"),
        (["--turn-timeout", "0"], "--turn-timeout is 0; give a number above 0"),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be made: Not a directory"),
        (["--core", "4096"], "this program may use the cores"),
        (["--header", "secret"], "is no header; write NAME:VALUE"),
        (["--reference", "none.json"], "none.json cannot be read"),
        (["ftp://x"], "'ftp://x' is no endpoint; write http://HOST:PORT"),
        ([URL], "two endpoints are called 127.0.0.1-9"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    assert problem in _refused(URL, "--out", tmp_path, *arguments)
