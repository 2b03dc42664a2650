"""What a machine needs before engines are pinned."""

from pathlib import Path

import pytest

from conserve_lab.peers import pinning


@pytest.mark.parametrize(("written", "warned"), [("1\n", True), ("0\n", False), (None, False)])
def test_cores_that_are_shared_out_by_session_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, warned: bool
) -> None:
    file = tmp_path / "sched_autogroup_enabled"
    if written is not None:
        file.write_text(written)
    monkeypatch.setattr(pinning, "_AUTOGROUP", file)
    problem = pinning.autogroup_warning()
    assert (problem is not None) == warned
    assert problem is None or "kernel.sched_autogroup_enabled=0" in problem
