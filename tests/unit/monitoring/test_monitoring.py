"""What is shipped for Prometheus and Grafana fits the metrics that the code declares."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.reference import groups
from tests.checkout import ROOT

FOLDER = ROOT / "deployments" / "monitoring"
ALERTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0][
    "rules"
]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
DECLARED = {metric.name: metric for group in groups().values() for metric in group}
# Labels that Prometheus adds, and those of histograms.
ANY_LABELS = {"job", "instance", "le"}


def expressions() -> list[str]:
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [*shown, *(rule["expr"] for rule in ALERTS)]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


def test_the_dashboard_is_up_to_date() -> None:
    """`python -m scripts.dashboard` rewrites it."""
    command = [sys.executable, "-m", "scripts.dashboard", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("expression", expressions())
def test_expressions_ask_for_metrics_and_labels_that_exist(expression: str) -> None:
    named = re.findall(r"\bconserve_\w+", expression)
    assert named or "up{" in expression
    labels = set(ANY_LABELS)
    for name in named:
        metric = DECLARED.get(name) or DECLARED[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert (metric.kind == "histogram") == (name != metric.name)
        labels |= set(metric.labels)
    asked = re.findall(r"[{,]\s*(\w+)\s*=", expression)
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        asked += re.split(r",\s*", grouped)
    assert set(asked) <= labels


def test_counters_are_asked_for_by_their_growth() -> None:
    """Their values mean little, since they begin again with the table's process."""
    counters = {name for name, metric in DECLARED.items() if metric.kind == "counter"}
    for expression in expressions():
        for name in re.findall(r"\bconserve_\w+", expression):
            grown = re.search(rf"(rate|increase)\({name}\b", expression)
            assert (grown is not None) == (name in counters or name.endswith("_bucket"))


def test_each_alert_says_what_to_do_and_where_it_is_described() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    anchors = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert 6 <= len(ALERTS) <= 9
    for rule in ALERTS:
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        told = rule["annotations"]
        assert told["summary"]
        assert len(told["description"].split()) > 15
        page, _, anchor = told["runbook"].partition("#")
        assert (ROOT / page).is_file()
        assert anchor == f"alert-{rule['alert'].lower()}"
        assert anchor in anchors


def test_panels_are_named_explained_and_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["targets"]


def test_promtool_accepts_the_configuration(promtool: str) -> None:
    """And the rules that it names."""
    command = [promtool, "check", "config", str(FOLDER / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_each_alert_fires_in_time_and_is_silent_otherwise(promtool: str, tmp_path: Path) -> None:
    text = Path(__file__).with_name("alerts.test.yaml").read_text()
    rules = tmp_path / "test.yaml"
    rules.write_text(text.replace("RULES", str(FOLDER / "alerts.yaml")))
    tried = {
        (one["alertname"], bool(one.get("exp_alerts")))
        for test in yaml.safe_load(text)["tests"]
        for one in test["alert_rule_test"]
    }
    assert tried == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}
    command = [promtool, "test", "rules", str(rules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
