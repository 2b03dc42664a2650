"""The folder of all environments: where it may be, and what `conserve doctor` says of it."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from conserve.settings import load
from conserve_cli.doctor.findings import Finding
from conserve_cli.doctor.node import check_addons
from conserve_tools.root import make_root, take_lock
from conserve_tools.sandbox import MARKER, marked
from deployments.start_checks import require_startable


def test_a_folder_that_can_be_made_lets_the_application_start(root: Path) -> None:
    require_startable(load({"environments": {"enabled": True, "root": str(root / "new")}}))


def test_a_folder_of_others_is_not_used(root: Path) -> None:
    root.symlink_to("/tmp")
    with pytest.raises(OSError, match="not a folder of this user's"):
        make_root(root)
    root.unlink()
    root.parent.chmod(0o777)
    with pytest.raises(OSError, match="others may replace"):
        make_root(root)


def found(root: Path) -> list[Finding]:
    return check_addons(load({"environments.root": str(root)}))


def test_the_doctor_warns_of_what_no_application_manages(tmp_path: Path) -> None:
    assert found(tmp_path / "none") == []
    assert found(tmp_path) == []
    (tmp_path / "7").mkdir()
    (tmp_path / "journal").touch()
    process = subprocess.Popen(
        ["sleep", "600"], env={MARKER: f"{tmp_path}:7"}, start_new_session=True
    )
    try:
        while not marked(f"{tmp_path}:"):
            time.sleep(0.02)
        (left,) = found(tmp_path)
        assert (left.level, left.subject) == ("warning", "environments")
        assert f"1 workspaces and 1 processes (pid {process.pid})" in left.seen
        lock = take_lock(tmp_path)
        assert [one.level for one in found(tmp_path)] == ["ok"]
        os.close(lock)
        assert found(tmp_path) == [left]
        (tmp_path / "7").rmdir()
        assert "0 workspaces and 1 processes" in found(tmp_path)[0].seen
    finally:
        process.kill()
        process.wait()
    assert found(tmp_path) == []
