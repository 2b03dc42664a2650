"""Prometheus itself, scraping the application that runs."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.checkout import ROOT

FOLDER = ROOT / "deployments" / "monitoring"
PROGRAM = shutil.which("prometheus")
_READY_WITHIN_S = 60.0


class Prometheus:
    """A server's HTTP interface."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return an expression's series now; fails where Prometheus cannot evaluate it."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def firing(self) -> set[tuple[str, ...]]:
        """Return the alerts that fire, each with what it is about."""
        return {
            (labels["alertname"], *(labels[name] for name in ("role", "reason") if name in labels))
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing"
            for labels in [alert["labels"]]
        }

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]


@contextmanager
def prometheus(folder: Path, *, at_once: bool = False) -> Iterator[Prometheus]:
    """Run it with the shipped configuration, but each second.

    Args:
        at_once: whether alerts fire as soon as their condition holds.
    """
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    config["scrape_configs"][1]["http_sd_configs"][0]["refresh_interval"] = "2s"
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"] if at_once else ():
        rule["for"] = "0s"
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    assert PROGRAM is not None
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_ready(url, process, folder / "prometheus.log")
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        try:
            if httpx.get(url + "/-/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
