"""Ratios and their intervals, alternating rounds, and the pictures and tables of reports."""

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conserve import versions
from conserve_lab import machine
from conserve_lab.client import Endpoint
from conserve_lab.compare import compare, labels, ratios, write_comparisons
from conserve_lab.driver import ArrivalPlan, DriveOptions, Lag, Run
from conserve_lab.latencies import Samples, samples
from conserve_lab.objectives import reference
from conserve_lab.plots import distribution, draw_all, failures
from conserve_lab.records import RecordWriter, TurnRecord, write_parquet
from conserve_lab.report import Report, ReportError, make_report, read_report, write_report
from conserve_lab.rounds import alternate, pooled
from tests.unit.conserve_lab.stub import Planned, Stub, refuse, serving


def _records(system: str, slower: float = 1.0, count: int = 20, seed: int = 0) -> list[TurnRecord]:
    """Conversations of three turns; every latency of every one is ``slower`` times as long."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        now_s = float(number)
        for turn in (1, 2, 3):
            first_s = now_s + slower * draw.uniform(0.5, 2.0)
            step_s = slower * draw.uniform(0.01, 0.05)
            times_s = tuple(first_s + step_s * token for token in range(5))
            before, last = 1000 * (turn - 1), turn == 3
            found.append(TurnRecord(
                system, f"c{number}", turn, planned_s=now_s, sent_s=now_s, ended_s=times_s[-1],
                outcome="completed", first_token_s=first_s, token_times_s=times_s, effective=last,
                last=last, prompt_tokens=before + 1000, output_tokens=5, cached_tokens=before,
                reused_tokens=before, server="d1",
            ))  # fmt: skip
            now_s = times_s[-1] + 3.0
    return found


def _run(system: str, slower: float = 1.0, seed: int = 0, **more: Any) -> Run:
    fine = Lag(0.001, 0.002, 0.003, 0.004, 0.5)
    run = Run(system, _records(system, slower, seed=seed), fine, 30.0, 20, False, 0, 0, None, None)
    return replace(run, **more)


def _report(
    system: str, slower: float = 1.0, rate_per_s: float = 1.0, seed: int = 0, **more: Any
) -> Report:
    return make_report(
        _run(system, slower, seed, **more),
        workload={"kind": "synthetic", "seed": seed},
        arrivals={"pattern": "poisson", "rate_per_s": rate_per_s, "concurrency": None},
        options={"turn_timeout_s": 600.0},
        unloaded=reference(_records("alone", 0.5, count=3)),
        unloaded_violations={"ttft_first": 0.25},
        kv_bytes_per_token=1000.0,
    )


# --- Ratios ---------------------------------------------------------------------------------------


def test_paired_ratios_of_a_system_twice_as_slow() -> None:
    found = ratios(samples(_records("a")), samples(_records("b", 2.0)), paired=True, draws=100)
    metrics = {ratio.metric for ratio in found}
    # Gaps are not the system's, so the latencies that contain them are not twice as long.
    with_gaps = {"ttfet", "e2e"}
    assert metrics > with_gaps
    for ratio in found:
        assert ratio.kind == "paired"
        assert ratio.count == 20
        assert ratio.low <= ratio.ratio <= ratio.high
        if ratio.metric in with_gaps:
            assert 1 < ratio.ratio < 2
        else:
            # Whatever conversations are drawn: each is twice as slow.
            assert (ratio.low, ratio.ratio, ratio.high) == pytest.approx((2, 2, 2))
            assert ratio.value_s == pytest.approx(2 * ratio.baseline_s)


def test_unpaired_ratios_are_less_sure() -> None:
    ours, theirs = samples(_records("a")), samples(_records("b", 2.0, count=30))
    found = ratios(ours, theirs, paired=False, draws=200)
    (ttft,) = [r for r in found if (r.metric, r.statistic) == ("ttft", "gmean")]
    assert (ttft.kind, ttft.count) == ("unpaired", 20)
    assert ttft.low < ttft.ratio < ttft.high
    assert ttft.low > 1.5


def test_only_conversations_that_both_have_are_paired() -> None:
    ours: Samples = {"e2e": {"a": [1.0], "b": [2.0], "lost": [100.0]}, "ttfet": {"a": [1.0]}}
    theirs: Samples = {"e2e": {"a": [3.0], "b": [6.0], "new": [500.0]}, "ttfet": {"b": [1.0]}}
    found = ratios(ours, theirs, paired=True, draws=50)
    assert {ratio.metric for ratio in found} == {"e2e"}
    assert {(ratio.count, round(ratio.ratio, 9)) for ratio in found} == {(2, 3.0)}


def test_nothing_is_divided_by_zero() -> None:
    zero: Samples = {"tbt": {"a": [0.0], "b": [0.0]}}
    assert ratios(zero, zero, paired=True, draws=50) == []
    half: Samples = {"tbt": {"a": [0.0], "b": [1.0]}}
    found = {r.statistic: r.baseline_s for r in ratios(half, half, paired=True, draws=50)}
    assert found == pytest.approx({"gmean": 1.0, "p50": 0.5, "p95": 0.95})


def test_reports_are_compared_with_the_first_system_at_the_same_rate() -> None:
    reports = [
        _report("a", 1.0, 0.5),
        _report("b", 2.0, 0.5),
        _report("a", 3.0, 1.0),
        _report("b", 6.0, 1.0, seed=1),
    ]
    names = ["a at 0.5/s", "b at 0.5/s", "a at 1/s", "b at 1/s"]
    assert labels(reports) == names
    assert labels([reports[0], reports[0]]) == ["a #1", "a #2"]
    found = compare(reports, draws=50)
    assert [(c.label, c.baseline) for c in found] == [(names[1], names[0]), (names[3], names[2])]
    # The last one ran other conversations.
    assert {r.kind for r in found[0].ratios} == {"paired"}
    assert {r.kind for r in found[1].ratios} == {"unpaired"}


# --- Rounds ---------------------------------------------------------------------------------------


async def test_rounds_alternate_with_the_same_slices() -> None:
    a, b = Stub(), Stub()
    started: list[str] = []

    def plan(round_: int) -> ArrivalPlan:
        return [(0.0, Planned(f"c{n}", [(0.0, f"{round_} {n}", True)])) for n in range(2)]

    async with serving(a), serving(b):
        found = await alternate(
            [Endpoint("a", a.url), Endpoint("b", b.url)],
            plan,
            4,
            DriveOptions(cache_salt="salt"),
            seed=1,
            on_record=lambda record: started.append(record.system),
        )
    prompts = [sorted(seen.body["prompt"] for seen in stub.turns) for stub in (a, b)]
    assert prompts[0] == prompts[1] == sorted(f"{r} {n}" for r in range(4) for n in range(2))
    assert {len(runs) for runs in found.values()} == {4}
    # In every round both, and not always in the same order.
    firsts = started[::4]
    assert all(set(started[at : at + 4]) == {"a", "b"} for at in range(0, 16, 4))
    assert set(firsts) == {"a", "b"}
    # No round finds another's prompts in the caches.
    salts = {seen.body["cache_salt"] for stub in (a, b) for seen in stub.turns}
    ids = {seen.headers["X-Conversation-Id"] for stub in (a, b) for seen in stub.turns}
    assert (len(salts), len(ids)) == (8, 16)

    whole = pooled(found["a"])
    assert len(whole.records) == whole.arrived == 8
    assert len({record.conversation for record in whole.records}) == 8
    assert whole.wall_s == pytest.approx(sum(run.wall_s for run in found["a"]))


async def test_a_later_round_may_begin_with_a_failure() -> None:
    stub = Stub({"bad": refuse})

    async with serving(stub):
        found = await alternate(
            [Endpoint("a", stub.url)],
            lambda round_: [(0.0, Planned("c", [(0.0, "bad" if round_ else "good", True)]))],
            2,
        )
    (runs,) = found.values()
    assert [run.records[0].outcome for run in runs] == ["completed", "failed"]


def test_rounds_are_moved_apart_when_pooled() -> None:
    whole = pooled([_run("a"), _run("a", seed=1)])
    first, second = whole.records[0], whole.records[60]
    assert (first.conversation, second.conversation) == ("0/c0", "1/c0")
    assert second.sent_s == 30.0
    assert second.first_token_s == second.token_times_s[0]
    # Latencies are what they were.
    alone = samples(_records("a", seed=1))["ttft"]["c0"]
    assert samples(whole.records)["ttft"]["1/c0"] == pytest.approx(alone)
    with pytest.raises(ValueError, match="no round"):
        pooled([])


def test_what_servers_and_gpus_count_is_added_up() -> None:
    counted = [
        _run("a", counters={"x": 1.0}, energy_j=10.0),
        _run("a", counters={"x": 2.0, "y": 3.0}, energy_j=20.0),
    ]
    whole = pooled(counted)
    assert (whole.counters, whole.energy_j) == ({"x": 3.0, "y": 3.0}, 30.0)
    # One round that is not known makes the sum unknown.
    whole = pooled([*counted, _run("a")])
    assert (whole.counters, whole.energy_j) == (None, None)


def _alternated() -> tuple[list[Run], list[Run]]:
    base = [_run("a", seed=seed) for seed in range(3)]
    other = [_run("b", slower, seed=seed) for seed, slower in enumerate((2.0, 3.0, 50.0))]
    return base, other


def test_rounds_are_compared_as_such_in_reports_of_one_call(tmp_path: Path) -> None:
    options = {"rounds": 3, "drive": {"id_prefix": "bench-1-"}}
    for name, runs in zip("ab", _alternated(), strict=True):
        report = replace(_report(name), options=options)
        whole = samples(pooled(runs).records)
        write_report(replace(report, samples=whole), tmp_path / f"{name}.json")
    a, b = (read_report(tmp_path / f"{name}.json") for name in "ab")
    (found,) = compare([a, b])
    assert {(ratio.kind, ratio.count) for ratio in found.ratios} == {("rounds", 3)}
    (ttft,) = [r for r in found.ratios if (r.metric, r.statistic) == ("ttft", "p50")]
    assert (ttft.ratio, ttft.low, ttft.high) == pytest.approx((3.0, 2.0, 50.0))
    # Another call's rounds were at another time, though their conversations are the same.
    (found,) = compare([a, replace(b, options={**options, "drive": {"id_prefix": "bench-2-"}})])
    assert {ratio.kind for ratio in found.ratios} == {"paired"}

    write_comparisons([found], tmp_path / "comparison.json")
    (written,) = json.loads((tmp_path / "comparison.json").read_text())["comparisons"]
    assert (written["label"], written["baseline"]) == ("b", "a")
    assert len(written["ratios"]) == len(found.ratios)


# --- Files, tables, pictures ----------------------------------------------------------------------


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = _report("a")
    write_report(report, tmp_path / "a.json")
    again = read_report(tmp_path / "a.json")
    assert again.result == report.result
    assert again.samples == report.samples
    assert again.objectives == report.objectives
    assert again.unloaded == report.unloaded
    assert again.rate_per_s == 1.0
    environment = again.environment
    assert set(environment["versions"]) == {
        "python", "conserve", "vllm", "ray", "lmcache", "torch",
    }  # fmt: skip
    assert environment["machine"]["cores"] >= 1
    assert environment["machine"]["memory_bytes"] > 2**28
    assert {"date", "git_commit"} < set(environment)

    (tmp_path / "newer.json").write_bytes(
        (tmp_path / "a.json").read_bytes().replace(b'"format":1', b'"format":9')
    )
    with pytest.raises(ReportError, match=r"newer\.json has format 9"):
        read_report(tmp_path / "newer.json")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_code_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_HERE", tmp_path / "conserve")
    (tmp_path / "conserve").mkdir()
    (tmp_path / "conserve" / "__init__.py").touch()

    def git(*arguments: str) -> None:
        name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "-C", tmp_path, *name, *arguments], check=True, capture_output=True)

    def commit() -> Any:
        return machine.environment()["git_commit"]

    git("init")
    assert commit() == "unknown"
    git("add", ".")
    git("commit", "-m", "one")
    assert re.fullmatch(r"[0-9a-f]{12}", commit())
    (tmp_path / "conserve" / "__init__.py").write_text("# Changed.")
    assert re.fullmatch(r"[0-9a-f]{12}-dirty", commit())


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    import pyarrow.parquet

    records = _records("a", count=2)
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        for number, record in enumerate(records, start=1):
            writer.write(record)
            # Nothing waits in this process.
            assert len(path.read_bytes().splitlines()) == number
    assert msgspec.json.Decoder(TurnRecord).decode_lines(path.read_bytes()) == records

    write_parquet(records, tmp_path / "records.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "records.parquet")
    assert table.column("conversation").to_pylist() == [record.conversation for record in records]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    fast, slow = _report("a", 1.0, 0.5), _report("a", 30.0, 2.0)
    reports = [
        replace(report, samples={metric: report.samples[metric] for metric in ("ttft", "tbt")})
        for report in (fast, slow)
    ]
    written = draw_all(reports, labels(reports), tmp_path / "new folder")
    assert {path.stem for path in written} == {
        "cdf-ttft-at-0.5", "cdf-tbt-at-0.5", "cdf-ttft-at-2", "cdf-tbt-at-2",
        "rate-ttft", "rate-ttfet", "rate-last-tbt", "rate-e2e-less-gaps", "rate-slo-violations",
    }  # fmt: skip
    assert {path.suffix for path in written} == {".png", ".svg"}
    for path in written:
        assert path.stat().st_size > 1000


def _legend(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_what_failed_keeps_a_distribution_from_its_end() -> None:
    figure = distribution({"a": [1.0, 2.0, 3.0]}, "TTFT", failed={"a": 1})
    (line,) = figure.axes[0].get_lines()
    assert list(line.get_ydata()) == [0.0, 0.25, 0.5, 0.75]
    assert _legend(figure.axes[0].get_legend()) == ["a (n = 3, 1 failed)"]
    records = _records("a")
    for record in records[:2]:
        record.outcome = "failed"
    report = _report("a", records=records)
    assert (failures(report, "ttft"), failures(report, "e2e")) == (2, 1)
