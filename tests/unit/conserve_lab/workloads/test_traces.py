"""Recordings are read as published; a broken one gives one error, which names the place."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conserve_lab.workloads import Arrivals, WorkloadError, recorded
from conserve_lab.workloads.traces import RecordedSession, read_session, recordings

Json = dict[str, Any]

CALL: Json = {"type": "n", "t": 0, "in": 130, "out": 5, "hash_ids": [1, 2], "stop": "end_turn"}
LATER: Json = CALL | {"t": 10.0, "type": "s", "in": 200, "hash_ids": [1, 2, 3], "api_time": 2.5}
SUB_AGENT: Json = {
    "type": "subagent",
    "t": 9.0,
    "agent_id": "agent_001",
    "tool_tokens": 10,
    "system_tokens": 10,
    "duration_ms": 4_000,
    "requests": [CALL, LATER],
}
SESSION: Json = {
    "id": "trace_1",
    "block_size": 64,
    "tool_tokens": 60,
    "system_tokens": 20,
    "requests": [CALL, SUB_AGENT, LATER],
}


def write(folder: Path, session: Any) -> Path:
    path = folder / "broken.json"
    path.write_text(json.dumps(session))
    return path


def read(path: Path) -> RecordedSession:
    (recording,) = recordings(path)
    return read_session(recording)


def refused(path: Path) -> str:
    """Return the error's message."""
    with pytest.raises(WorkloadError) as error:
        read(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def change(*path: str | int, **fields: Any) -> Callable[[Json], None]:
    def apply(session: Json) -> None:
        record: Any = session
        for step in path:
            record = record[step]
        record.update(fields)

    return apply


def drop(field: str, *path: str | int) -> Callable[[Json], None]:
    def apply(session: Json) -> None:
        record: Any = session
        for step in path:
            record = record[step]
        del record[field]

    return apply


def seen(path: Path) -> Json:
    """Return the parts of a session that its file decides."""
    session = read(path)
    sub = session.sub_agents[0] if session.sub_agents else None
    workload = recorded(path, sessions=1, arrivals=Arrivals(), vocabulary=range(1000))
    return {
        "name": session.name,
        "head": (session.tool_tokens, session.system_tokens),
        "blocks": [(call.kept_blocks, call.new_blocks.tolist()) for call in session.calls],
        "tools": [call.tool for call in session.calls],
        "sub": sub and (sub.after, sub.started_s, sub.ended_s, sub.session.name),
        "starts": sub and [call.started_s for call in sub.session.calls],
        "same ids": sub and sub.session.calls[0].new_blocks.tolist() == [1, 2],
        "without ids": workload.counts.get("prompts_without_hash_ids"),
    }


NO_SUB = {"sub": None, "starts": None, "same ids": None}
LIKE_AIPERF = SUB_AGENT | {"requests": [CALL | {"t": 9.0}, LATER | {"t": 15.0}]}
READ: list[tuple[Callable[[Json], None], Json]] = [
    (drop("block_size"), {"same ids": False}),
    (change(tool_tokens=None), {"head": (0, 20)}),
    (drop("stop", "requests", 2), {"tools": ["", None]}),
    (change("requests", 0, stop=None), {"tools": [None, ""]}),
    (drop("hash_ids", "requests", 2), {"blocks": [(0, [1, 2]), (0, [])], "without ids": 1}),
    (change("requests", 0, hash_ids=None, **{"in": 9}), {"blocks": [(0, []), (0, [1, 2, 3])]}),
    (change(hash_id_scope="local"), {"same ids": True}),
    (change("requests", 1, agent_id="é 1"), {"sub": (0, 5.0, 9.0, "__1")}),
    (change(requests=[CALL, LIKE_AIPERF, LATER]),
     {"sub": (0, 9.0, 13.0, "agent_001"), "starts": [0.0, 6.0]}),
    (change("requests", 1, requests=[]), NO_SUB),
    (change(requests=[SUB_AGENT, CALL, LATER]), NO_SUB),
    (change(id="../é\n" + "x" * 99), {"name": "..___" + "x" * 75}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), READ)
def test_what_is_missing_means_what_it_does_to_the_tools_that_record(
    tmp_path: Path, changes: Callable[[Json], None], expected: Json
) -> None:
    plain = seen(write(tmp_path, SESSION))
    session = json.loads(json.dumps(SESSION))
    changes(session)
    assert seen(write(tmp_path, session)) == plain | expected


TEXT = json.dumps(SESSION).encode()


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ({"a.jsonl": TEXT + b"\n\n" + TEXT + b"\r\n"}, ["a.jsonl, line 1", "a.jsonl, line 3"]),
        ({"a.NDJSON.gz": gzip.compress(b"\n" + TEXT, mtime=0)}, ["a.NDJSON.gz, line 2"]),
        ({"a.json": TEXT + b"\n" + TEXT}, ["a.json, line 1", "a.json, line 2"]),
        ({"A.JSON": b"\xef\xbb\xbf" + json.dumps(SESSION, indent=1).encode()}, ["A.JSON"]),
        ({"p/ä 1.json": TEXT, "._a.json": b"", ".c/b.json": b"", "p/.b.json": b""}, ["p/ä 1.json"]),
    ],
)  # fmt: skip
def test_files_are_read_as_people_bring_them(
    tmp_path: Path, files: dict[str, bytes], lines: list[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = recordings(tmp_path)
    assert [recording.name for recording in found] == [f"{tmp_path}/{line}" for line in lines]
    assert {read_session(recording).name for recording in reversed(found)} == {"trace_1"}


BROKEN = [
    (drop("id"), "broken.json", "`id`; recorded sessions are read in the format of kv-cache"),
    (change("requests", 1, "requests", 0, out=-1), "requests[1].requests[0]", ".out`"),
    (change("requests", 0, hash_ids=[1]), "requests[0]", "1 blocks, but 130 tokens (in) are 2"),
    (change("requests", 0, type="x\ny"), "requests[0]", "'x y'"),
    (change("requests", 0, t=11), "requests[2]", "t is 10 s, before the call above it (11 s)"),
    (change(requests=[]), "requests", "is empty"),
]


@pytest.mark.parametrize(("breaks", "record", "problem"), BROKEN)
def test_a_broken_record_is_named(
    tmp_path: Path, breaks: Callable[[Json], None], record: str, problem: str
) -> None:
    session = json.loads(json.dumps(SESSION))
    breaks(session)
    message = refused(write(tmp_path, session))
    assert record in message
    assert problem in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"{", "is not JSON"),
        (b'{"x": ' + b"[" * 100_000, "is not JSON"),
        (gzip.compress(json.dumps(SESSION).encode(), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "broken.json.gz"
    path.write_bytes(content)
    assert problem in refused(path)
