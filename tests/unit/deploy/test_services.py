"""The unit of deploy/systemd and the Compose file of deploy/compose."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest

from conserve.settings import load
from tests.checkout import ROOT
from tests.unit.deploy.manifests import DRAINED_WITHIN_S, SCHEMAS, read

UNIT = (ROOT / "deploy" / "systemd" / "conserve.service").read_text()
FOLDER = ROOT / "deploy" / "compose"
(COMPOSE,) = read(FOLDER / "compose.yaml")
SETTINGS = load(read(FOLDER / "settings.yaml")[0])
GRACE_S = SETTINGS.drain_timeout_s + DRAINED_WITHIN_S


def test_the_unit_drains_and_locks_memory() -> None:
    said = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    assert (said["KillMode"], said["KillSignal"], said["LimitMEMLOCK"]) == (
        "mixed", "SIGTERM", "infinity",
    )  # fmt: skip
    assert float(said["TimeoutStopSec"]) >= GRACE_S
    assert "PASS" not in UNIT


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_with_the_score_of_the_docs(tmp_path: Path) -> None:
    file = tmp_path / "conserve.service"

    def analyzed(unit: str, *command: str) -> str:
        file.write_text(unit.replace("/opt/conserve/.venv/bin/conserve", sys.executable))
        done = subprocess.run(
            ["systemd-analyze", *command, str(file)], capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    assert analyzed(UNIT, "verify") == ""
    assert "Unknown key name 'KillMod'" in analyzed(UNIT.replace("KillMode", "KillMod"), "verify")
    (score,) = re.findall(
        r"exposure level .*: ([\d.]+) ", analyzed(UNIT, "security", "--offline=1")
    )
    assert f"`{score}`" in (ROOT / "docs" / "services.md").read_text()


def test_compose_accepts_the_file_and_no_misspelt_field() -> None:
    valid = jsonschema_rs.Draft7Validator(SCHEMAS["compose"]).is_valid
    assert valid(COMPOSE)
    for name, service in COMPOSE["services"].items():
        for key in service:
            other = {f"{one}x" * (one == key) or one: value for one, value in service.items()}
            assert not valid({**COMPOSE, "services": {**COMPOSE["services"], name: other}})


def test_the_containers_are_on_loopback_and_mount_what_is_there() -> None:
    assert SETTINGS.host == "127.0.0.1"
    assert "password" not in str(COMPOSE).lower()
    services = COMPOSE["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    for name, service in services.items():
        assert service["network_mode"] == "host"
        assert "ports" not in service
        here = [one.partition(":")[0] for one in service["volumes"]]
        assert all((FOLDER / one).exists() for one in here if one not in COMPOSE["volumes"])
        if name.startswith("conserve"):
            assert float(service["stop_grace_period"].removesuffix("s")) >= GRACE_S
            assert service["user"] == "1000:1000"
