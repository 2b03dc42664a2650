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
