"""The comparison of several systems: who is up with whom, what is run, and what is made of it."""

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from conserve_lab.compare import compare
from conserve_lab.peers import Options, Peer, PeerUnavailable
from conserve_lab.report import read_report
from experiments.suite import fleet, turns
from experiments.suite.__main__ import main
from experiments.suite.fleet import Room
from tests.unit.conserve_lab.stub import Stub, served

GB = 10**9


class Result(NamedTuple):
    """The end of a run, and what it printed."""

    exit_code: int
    output: str


def _run(out: Path, *more: str) -> Result:
    arguments = ["--out", str(out), "--conversations", "2", "--rounds", "2"]
    arguments += ["--scale-tokens", "0.01", "--scale-gaps", "0", "--shares", "1", *more]
    output, exit_code = io.StringIO(), 0
    with redirect_stdout(output), redirect_stderr(output):
        try:
            main(arguments)
        except SystemExit as error:
            exit_code = int(error.code or 0)
    return Result(exit_code, output.getvalue())


@dataclass
class Machine:
    """A machine on which every system takes 4 GB, and ``ray_pd`` cannot be started.

    Attributes:
        free_bytes: what is free with none up.
        up: systems that are up, as they were started.
        events: names with + where one was started, and - where it was stopped.
    """

    url: str
    free_bytes: int
    up: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    most_up: int = 0

    @contextmanager
    def start(
        self, name: str, options: Options, tell: Callable[[str], None]
    ) -> Iterator["Machine.Apart"]:
        if name == "ray_pd":
            raise PeerUnavailable("it needs a driver")
        called = f"{name}-{options.wrong_decision_rate:g}" if name == "per_turn" else name
        self.events.append(f"+{called}")
        self.up.append(called)
        self.most_up = max(self.most_up, len(self.up))
        takes_min_tokens = name == "conserve"
        described = {"engines": options.engines}
        peer = Peer(name, self.url, "stub-model", "X-Session", takes_min_tokens, described)
        yield Machine.Apart(peer)
        self.up.remove(called)
        self.events.append(f"-{called}")

    @dataclass
    class Apart:
        peer: Peer

        def memory_bytes(self) -> int:
            return 4 * GB

        def cpu_s(self) -> float:
            return 1.0

    def memory(self) -> Any:
        """As psutil has it."""

        class Memory:
            total = 20 * GB
            available = self.free_bytes - 4 * GB * len(self.up)

        return Memory


@pytest.fixture
def stub() -> Iterator[Stub]:
    with served(Stub()) as stub:
        yield stub


@pytest.fixture
def machine(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With room for all."""
    machine = Machine(stub.url, 100 * GB)
    monkeypatch.setattr(fleet, "start_apart", machine.start)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine.memory())
    monkeypatch.setattr(turns, "_IDLE_S", 0.01)
    return machine


def _reports(out: Path) -> list[dict[str, Any]]:
    paths = [path for path in out.glob("at-*/*.json") if path.name != "comparison.json"]
    return [json.loads(path.read_text()) for path in sorted(paths)]


def _rows(out: Path, column: str) -> list[list[str]]:
    """The systems of each table that has this column."""
    tables = re.findall(r"(?:^\|.*\n)+", (out / "results.md").read_text(), re.MULTILINE)
    return [
        [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]
        for table in tables
        if column in table.splitlines()[0]
    ]


def test_systems_that_have_room_are_up_together_and_alternate(
    tmp_path: Path, machine: Machine, stub: Stub
) -> None:
    result = _run(
        tmp_path,
        *("--systems", "per_turn,ray_pd", "--wrong-decision-rates", "0.5", "--shares", "0.5,1"),
    )
    assert result.exit_code == 0, result.output
    assert machine.events[:2] == ["+conserve", "+per_turn-0.5"]
    assert machine.up == []
    text = (tmp_path / "results.md").read_text()
    # A table of figures and one of ratios at each rate.
    assert _rows(tmp_path, "failed turns") == 2 * [["conserve", "per_turn-50"]]
    assert _rows(tmp_path, "TTFET p95") == 2 * [["per_turn-50"]]
    assert "**conserve, per_turn-50.** Alternated rounds: 2, seed 0, in this order: " in text
    assert "All of them were up at the same time (92.0 GB of memory are free beside 2 " in text
    assert "nobody asked it anything: conserve 0.00, per_turn-50 0.00." in text
    assert "- ray_pd was not measured: it needs a driver" in text
    assert text in result.output
    reports = _reports(tmp_path)
    assert len(reports) == 4
    assert len({json.dumps(report["workload"]) for report in reports}) == 1
    assert len({json.dumps(report["objectives"]) for report in reports}) == 1
    for report in reports:
        alternation = report["environment"]["alternation"]
        assert (alternation["unit"], alternation["count"], alternation["seed"]) == ("rounds", 2, 0)
        # In two rounds of two, each is first once.
        assert sorted(alternation["order"]) == [
            ["conserve", "per_turn-50"], ["per_turn-50", "conserve"],
        ]  # fmt: skip
    low, high = sorted({report["arrivals"]["rate_per_s"] for report in reports})
    assert high == pytest.approx(2 * low, rel=1e-3)
    assert (tmp_path / "per_turn-50.started.json").exists()
    assert list(tmp_path.glob("cdf-ttft*.png"))
    assert list(tmp_path.glob("ratios-at-*.png"))
    assert any("X-Session" in seen.headers for seen in stub.turns)
    # Only per_turn refuses it here.
    assert {"min_tokens" in seen.body for seen in stub.turns} == {True, False}


def test_systems_without_room_are_started_in_turn(tmp_path: Path, machine: Machine) -> None:
    machine.free_bytes = 7 * GB
    result = _run(tmp_path, "--systems", "collocated,ray_pd", "--rounds", "3")
    assert result.exit_code == 0, result.output
    assert machine.most_up == 1
    text = (tmp_path / "results.md").read_text()
    assert "**conserve, collocated.** Alternated starts: 3, seed 0, in this order: " in text
    assert "One of them was up at a time (3.0 GB of memory are free beside 1 system" in text
    assert "- ray_pd was not measured: it needs a driver" in text
    assert _rows(tmp_path, "TTFET p95") == [["collocated"]]
    # Once for the rates, then three times in the order that reports have.
    order = _reports(tmp_path)[0]["environment"]["alternation"]["order"]
    started = [event[1:] for event in machine.events if event[0] == "+"]
    assert started == ["conserve", *(name for names in order for name in names)]
    names = ("conserve", "collocated")
    (folder,) = tmp_path.glob("at-*")
    (found,) = compare([read_report(folder / f"{name}.json") for name in names])
    assert {ratio.kind for ratio in found.ratios} == {"starts"}
    # On a busy machine not every start has every figure.
    assert max(ratio.count for ratio in found.ratios) == 3


def test_with_room_for_two_each_is_up_with_the_one_that_ratios_are_to(
    tmp_path: Path, machine: Machine
) -> None:
    machine.free_bytes = 12 * GB
    systems = "conserve,collocated,vllm"
    result = _run(tmp_path, "--systems", systems, "--against", "collocated")
    assert result.exit_code == 0, result.output
    assert machine.most_up == 2
    # ConServe gives the rate, and so is up first.
    assert [event for event in machine.events if event[0] == "+"] == [
        "+conserve", "+collocated", "+vllm",
    ]  # fmt: skip
    assert _rows(tmp_path, "failed turns") == [["collocated", "conserve"], ["collocated", "vllm"]]
    assert _rows(tmp_path, "TTFET p95") == [["conserve"], ["vllm"]]
    assert "Times collocated's within the same rounds" in (tmp_path / "results.md").read_text()
    assert list(tmp_path.glob("group-2/cdf-ttft*.png"))


def test_rates_that_are_given_need_no_conserve(tmp_path: Path, machine: Machine) -> None:
    arguments = ("--systems", "elastic,collocated", "--against", "collocated")
    result = _run(tmp_path, *arguments, "--rates", "20,40")
    assert result.exit_code == 0, result.output
    assert [event for event in machine.events if event[0] == "+"] == ["+collocated", "+elastic"]
    rates = {report["arrivals"]["rate_per_s"] for report in _reports(tmp_path)}
    assert rates == {20.0, 40.0}
    assert _rows(tmp_path, "TTFET p95") == 2 * [["elastic"]]


def test_conserve_alone_has_all_conversations_in_one_run(tmp_path: Path, machine: Machine) -> None:
    result = _run(tmp_path, "--systems", "conserve")
    assert result.exit_code == 0, result.output
    (report,) = _reports(tmp_path)
    assert report["environment"]["alternation"] is None
    assert report["workload"]["conversations"] == 4
    assert "conserve alone (there is no other system)." in (tmp_path / "results.md").read_text()


def test_on_gpus_one_system_is_up_at_a_time(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Options, "gpu", True)
    result = _run(tmp_path, "--systems", "collocated")
    assert result.exit_code == 0, result.output
    assert machine.most_up == 1
    text = (tmp_path / "results.md").read_text()
    assert "One of them was up at a time (each system's engines take whole GPUs)" in text


def test_without_conserve_there_is_nothing_to_be_relative_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def start(*_: object) -> Iterator[Peer]:
        raise PeerUnavailable("port 8000 is in use")
        yield

    monkeypatch.setattr(fleet, "start_apart", start)
    result = _run(tmp_path)
    assert result.exit_code == 1
    assert "conserve, which all is relative to: port 8000 is in use" in result.output


@pytest.mark.parametrize(
    ("free_gb", "up_gb", "most_gb", "fits"),
    [
        # Of 20 GB, one is left to the machine: 5 are enough for one that takes 4, 4.9 are not.
        (5.0, [4.0], 4.0, True),
        (4.9, [4.0], 4.0, False),
        # One that is up, and has not worked yet, comes to as much as the other.
        (5.0, [4.0, 3.0], 4.0, False),
        (6.0, [4.0, 3.0], 4.0, True),
        (3.0, [], 2.0, True),
    ],
)
def test_room_is_what_is_left_once_all_have_grown(
    free_gb: float, up_gb: list[float], most_gb: float, fits: bool
) -> None:
    up_bytes = [round(taken * GB) for taken in up_gb]
    room = Room(20 * GB, round(free_gb * GB), up_bytes, round(most_gb * GB))
    assert room.fits is fits
    assert ("one more fits" if fits else "no more fit") in room.told()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--systems", "conserve,dynamo"], "systems: no dynamo"),
        (
            ["--systems", "vllm", "--against", "ray_pd"],
            "against: ray_pd is not among conserve, vllm",
        ),
        (["--rates", "1,b"], "--rates: '1,b': give numbers from 0"),
        (["--rates", "1", "--systems", "vllm"], "against: conserve is not among vllm"),
        (["--wrong-decision-rates", "2"], "wrong_decision_rate: 2.0 is not from 0 to 1"),
        (["--data", "/nowhere"], "/nowhere: there is no such file or folder"),
        (["--engines", "1"], "engines: 1 is too few; give at least 2"),
        (["--cores", "0,0"], "cores: 1 different ones for 2 engines"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = _run(tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output
