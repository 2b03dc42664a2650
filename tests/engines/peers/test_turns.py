"""Two applications up at once on one machine, which take turns; one stops, and the other serves."""

import asyncio
from pathlib import Path

import pytest

from conserve_lab.compare import compare
from conserve_lab.driver import DriveOptions
from conserve_lab.measure import MeasurementSettings, measure
from conserve_lab.peers import Options
from conserve_lab.selection import Selection
from experiments.suite.fleet import Fleet, Variant
from tests.engines.applications import START_S

pytestmark = pytest.mark.usefixtures("machine_alone")


@pytest.mark.long
def test_two_applications_are_up_at_once_and_alternate(tmp_path: Path) -> None:
    systems = ["conserve", "collocated"]
    selection = Selection(
        "synthetic", conversations=2, pattern="together", preset="react",
        scale_tokens=0.15, scale_gaps=0.0, max_context_tokens=4000,
    )  # fmt: skip
    with Fleet(tmp_path, lambda text: None) as fleet:
        for name in systems:
            options = Options(engines=2, timeout_s=START_S, logs=tmp_path / name)
            fleet.start(Variant(name, name, options))
        one, other = endpoints = [fleet.endpoint(name) for name in systems]
        assert one.url != other.url
        settings = MeasurementSettings(
            endpoints, selection, DriveOptions(cache_salt="turns"), rounds=2, unloaded=1
        )
        # Neither takes a core from the other while nobody asks it anything.
        idle_cores = fleet.idle_cores(5.0)
        assert all(busy < 0.5 for busy in idle_cores.values()), idle_cores
        reports = asyncio.run(measure(settings)).reports
        for report in reports:
            assert set(report.result.turns) == {"completed"}
            assert report.environment["alternation"]["count"] == 2
        # Each is what it was started as, and got its own turns alone.
        handed_off, kept = [report.result.server.handoffs for report in reports]
        assert handed_off
        assert kept == 0
        (found,) = compare(reports)
        assert {(ratio.kind, ratio.count) for ratio in found.ratios} == {("rounds", 2)}
        assert all(taken > 10**9 for taken in fleet.look())

        fleet.stop([systems[0]])
        assert fleet.up == [systems[1]]
        alone = MeasurementSettings([other], selection, DriveOptions(cache_salt="alone"))
        (report,) = asyncio.run(measure(alone)).reports
        assert set(report.result.turns) == {"completed"}
