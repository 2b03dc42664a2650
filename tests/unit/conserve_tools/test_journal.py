"""The journal: its content after a crash at any byte, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_tools import journal as journals
from conserve_tools.journal import Journal, JournalError

ENTRIES = [{"op": "declare", "number": number, "said": "é\n" * number} for number in range(1, 4)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, entries: list[dict[str, Any]]) -> bytes:
    journal = Journal(path)
    for entry in entries:
        journal.add(entry)
    journal.close()
    return path.read_bytes()


@given(data=st.data())
def test_a_crash_at_any_byte(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whole entries count, half of one does not, and what follows is whole again."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    whole = written(path, ENTRIES)
    kept = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:kept])
    journal = Journal(path)
    assert journal.found == ENTRIES[: whole[:kept].count(b"\n")]
    journal.add({"op": "removed", "number": 9})
    journal.close()
    assert read(path) == [*journal.found, {"op": "removed", "number": 9}]


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'{"op":"next","number":1}\nhalf a li\n{"op":"next","number":2}\n')
    with pytest.raises(JournalError, match="line 2"):
        Journal(path)
    path.write_bytes(b"[1]\n")
    with pytest.raises(JournalError, match="line 1"):
        Journal(path)
    assert Journal(tmp_path / "none").found == []


def test_it_is_written_anew_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_MOST_LINES", 3)
    path = tmp_path / "journal"
    journal = Journal(path)
    for entry in ENTRIES:
        assert not journal.is_long
        journal.add(entry)
    assert journal.is_long
    journal.rewrite(ENTRIES[:1])
    assert not journal.is_long
    journal.add(ENTRIES[2])
    assert read(path) == [ENTRIES[0], ENTRIES[2]]
    assert os.listdir(tmp_path) == ["journal"]


def test_half_an_entry_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.add(ENTRIES[0])
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(OSError, match="full"):
            journal.add(ENTRIES[1])
    assert read(path) == ENTRIES[:1]
    journal.add(ENTRIES[2])
    assert read(path) == [ENTRIES[0], ENTRIES[2]]
