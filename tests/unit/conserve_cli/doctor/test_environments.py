"""Tool environments that no application manages."""

import os
import subprocess
import time
from pathlib import Path

from conserve.settings import load
from conserve_cli.doctor.environments import check_environments
from conserve_cli.doctor.findings import Finding
from deployments.environments.sandbox import MARKER, marked
from deployments.environments.service import take_lock
from tests.unit.conserve_cli.doctor.here import assert_finds


def check(root: Path) -> list[Finding]:
    return list(check_environments(load({"environments.root": str(root)})))


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
        left = f"1 workspaces and 1 processes (pid {process.pid}) that"
        assert_finds(check(tmp_path), ("warning", "environments", left))
        lock = take_lock(tmp_path)
        assert [one.level for one in check(tmp_path)] == ["ok"]
        os.close(lock)
        assert_finds(check(tmp_path), ("warning", "environments", left))
    finally:
        process.kill()
        process.wait()
    (tmp_path / "7").rmdir()
    assert check(tmp_path) == []
