"""Files that are read again when they change."""

import logging
from pathlib import Path

import pytest

from conserve.followed import Followed


def test_files_are_read_again_once_either_has_changed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text("1")
    followed = Followed(paths, lambda: "".join(path.read_text() for path in paths), 0.0)
    for number, path in enumerate(paths, 2):
        path.write_text("x" * number)
        before = followed.says(10.0 * number - 10)
        assert followed.says(10.0 * number - 9.5) == before
    assert followed.says(30.0) == "xxxxx"


def test_what_was_read_stays_while_a_file_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    followed = Followed([path], path.read_text, 0.0)
    path.unlink()
    with caplog.at_level(logging.ERROR):
        assert [followed.says(now_s) for now_s in (2.0, 4.0, 6.0)] == ["1"] * 3
    assert len(caplog.records) == 1
    path.write_text("22")
    assert followed.says(8.0) == "22"
