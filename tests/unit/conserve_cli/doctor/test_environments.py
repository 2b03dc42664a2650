"""What is left of environments, and that a live manager's are left alone."""

import os
import subprocess
import time
from pathlib import Path

from conserve.settings import load
from conserve_cli.doctor.facts import Finding
from conserve_cli.doctor.observe import observe_environments
from conserve_cli.doctor.verdict import check_environments
from deployments.environments.sandbox import MARKER, marked
from deployments.environments.service import take_lock
from tests.unit.conserve_cli.doctor.sound import bad


def check(root: Path) -> list[Finding]:
    settings = load({"environments.root": str(root)})
    return check_environments(observe_environments(settings))


def test_what_nobody_manages_is_told(tmp_path: Path) -> None:
    assert check(tmp_path / "none") == []
    assert check(tmp_path) == []
    (tmp_path / "7").mkdir()
    (tmp_path / "journal").touch()
    process = subprocess.Popen(
        ["sleep", "600"], env={MARKER: f"{tmp_path}:7"}, start_new_session=True
    )
    try:
        while not marked(f"{tmp_path}:"):
            time.sleep(0.02)
        findings = check(tmp_path)
        assert bad(findings) == [("warning", "environments")]
        assert "1 workspaces and 1 processes" in findings[0].seen
        assert f"pid {process.pid}" in findings[0].seen
        lock = take_lock(tmp_path)
        assert [one.level for one in check(tmp_path)] == ["ok"]
        os.close(lock)
        assert bad(check(tmp_path)) == [("warning", "environments")]
    finally:
        process.kill()
        process.wait()
    (tmp_path / "7").rmdir()
    assert check(tmp_path) == []
