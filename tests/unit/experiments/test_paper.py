"""The paper's figures beside their simulation."""

import json
from pathlib import Path

import pytest

from autoscale.capacity.profile import load_profile
from conserve_lab.records import TurnRecord
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.run import EngineCounts, make_system, serve
from conserve_lab.workloads import Arrivals, synthetic
from experiments import paper
from experiments.paper import SHAPE, cold_prefill_s, saturating

PROFILE = "a40-qwen3-0.6b"


def test_saturating_arrivals_keep_the_prefiller_busy_and_nobody_waiting() -> None:
    profile = load_profile(PROFILE)
    prefiller = Costs.of(profile, "prefiller")
    workload = synthetic(
        SHAPE, conversations=40, arrivals=Arrivals("even", 1.0), vocabulary=range(1_000, 4_000)
    )
    records: list[TurnRecord] = []
    system = make_system("conserve", profile, EngineCounts())
    cluster = serve(system, saturating(workload, prefiller), records.extend)
    first = sorted((r for r in records if r.turn == 1), key=lambda record: record.sent_s)
    took_s = [cold_prefill_s(record.prompt_tokens, prefiller) for record in first]
    assert [r.sent_s for r in first] == pytest.approx([sum(took_s[:i]) for i in range(40)])
    assert cluster.prefillers["prefiller-0"].busy_prefill_s == pytest.approx(sum(took_s))


def test_the_papers_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Few conversations: not the values, but that each is there, and what cannot be otherwise."""
    paper.main(["--conversations", "5", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "paper.json").read_text())
    rows = {row["what"]: row["simulated"] for row in found}
    assert len(rows) == len(found) == 31
    assert {row["figure"] for row in found} == {"10", "12", "13"}
    # Without wrong decisions per-turn placement is ConServe's; fewer watts are more tokens/J.
    assert rows["TTFET gmean, no wrong decision over ConServe"] == 1.0
    assert rows["tokens/J, ConServe, decoders at 200 W against 300 W"] > 0.1
    assert rows["TTFET, E2E gmean, full disaggregation, any rate: least"] > 1.0
    assert "-51.1%" in capsys.readouterr().out
    assert list(tmp_path.glob("rate-ttfet.*"))
