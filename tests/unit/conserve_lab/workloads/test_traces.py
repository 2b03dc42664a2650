"""Recordings are read as people have them; a broken one gives one line, which names the place."""

import gzip
import json
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from conserve_lab.cli.plan import planned_turns
from conserve_lab.records import TurnRequest
from conserve_lab.selection import Selection
from conserve_lab.workloads import Arrivals, Workload, WorkloadError, recorded
from conserve_lab.workloads.files import recordings
from conserve_lab.workloads.recorded import recorded_sessions
from tests.checkout import ROOT

Json = dict[str, Any]

CALL: Json = {"type": "n", "t": 0, "in": 130, "out": 5, "hash_ids": [1, 2], "stop": "end_turn"}
LATER: Json = CALL | {"t": 10.0, "type": "s", "in": 200, "hash_ids": [1, 2, 3], "api_time": 2.5}
SUB_AGENT: Json = {
    "type": "subagent", "t": 9.0, "agent_id": "agent_001", "tool_tokens": 10, "system_tokens": 10,
    "duration_ms": 4_000, "requests": [CALL, LATER],
}  # fmt: skip
SESSION: Json = {
    "id": "trace_1", "block_size": 64, "tool_tokens": 60, "system_tokens": 20,
    "requests": [CALL, SUB_AGENT, LATER],
}  # fmt: skip


def write(folder: Path, session: Any) -> Path:
    path = folder / "broken.json"
    path.write_text(json.dumps(session))
    return path


def read(path: Path) -> Any:
    (session,) = recorded_sessions(path).values()
    return session()


def refused(path: Path) -> str:
    """Return the error's message."""
    with pytest.raises(WorkloadError) as error:
        read(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def part(session: Any, path: tuple[str | int, ...]) -> Any:
    return part(session[path[0]], path[1:]) if path else session


def change(*path: str | int, **fields: Any) -> Callable[[Json], None]:
    return lambda session: part(session, path).update(fields)


def drop(field: str, *path: str | int) -> Callable[[Json], Any]:
    return lambda session: part(session, path).pop(field)


def play(path: Path, sessions: int = 1, **options: Any) -> Workload:
    arrivals, vocabulary = Arrivals("even"), range(1000)
    return recorded(path, sessions=sessions, arrivals=arrivals, vocabulary=vocabulary, **options)


def turns_of(workload: Workload) -> list[list[TurnRequest]]:
    return [list(iter(partial(script.next, None), None)) for _, script in workload]


def seen(path: Path) -> Json:
    """Return the parts of a session that its file decides."""
    session = read(path)
    sub = session.sub_agents[0] if session.sub_agents else None
    workload = play(path)
    return {
        "name": next(iter(workload))[1].conversation,
        "head": [part.tokens for part in session.begins],
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
    (change(tool_tokens=None), {"head": [0, 20]}),
    (drop("stop", "requests", 2), {"tools": ["", None]}),
    (change("requests", 0, stop=None), {"tools": [None, ""]}),
    (drop("hash_ids", "requests", 2), {"blocks": [(0, [1, 2]), (0, [])], "without ids": 1}),
    (change("requests", 0, hash_ids=None, **{"in": 9}), {"blocks": [(0, []), (0, [1, 2, 3])]}),
    (change(hash_id_scope="local"), {"same ids": True}),
    (change("requests", 1, agent_id="é 1"), {"sub": (0, 5.0, 9.0, "é 1")}),
    (change(requests=[CALL, LIKE_AIPERF, LATER]),
     {"sub": (0, 9.0, 13.0, "agent_001"), "starts": [0.0, 6.0]}),
    (change("requests", 1, requests=[]), NO_SUB),
    (change(requests=[SUB_AGENT, CALL, LATER]), NO_SUB),
    (change(id="../é\n" + "x" * 99), {"name": "00000-..___" + "x" * 75}),
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
        ({"a.json": b"[%b, %b]" % (TEXT, TEXT)}, ["a.json, item 1", "a.json, item 2"]),
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
    assert {session().name for session in recorded_sessions(tmp_path).values()} == {"trace_1"}


BROKEN = [
    (drop("id"), 'json: expected field id, found {"block_size":64,"tool_tokens":60'),
    (change("requests", 1, "requests", 0, out=-1), ".requests[0].out: expected whole number >= 0"),
    (change("requests", 0, hash_ids=[1]), "[0].hash_ids: expected 2 whole blocks of 64, as in is"),
    (change("requests", 0, hash_ids={}), "requests[0].hash_ids: expected list or null, found {}"),
    (change("requests", 0, type="x\ny"), 'type: expected n, s or subagent, found "x\\ny"'),
    (change("requests", 0, t=11), "requests[2].t: expected at least 11 s, as in the call"),
    (change(requests=[]), "requests: expected at least one call, found none"),
]


@pytest.mark.parametrize(("breaks", "problem"), BROKEN)
def test_a_broken_record_is_named(
    tmp_path: Path, breaks: Callable[[Json], None], problem: str
) -> None:
    session = json.loads(json.dumps(SESSION))
    breaks(session)
    assert problem in refused(write(tmp_path, session))


NESTED = SESSION
for _ in range(60):
    NESTED = SESSION | {"requests": [CALL, SUB_AGENT | {"requests": NESTED["requests"]}]}
PACKED = gzip.compress(TEXT, mtime=0)
REFUSED = [
    (b" [ ]\n", "is empty"),
    (b'{"id": "a",\n"requests": [}', "line 2, is not JSON"),
    (b'{"id": "a", "requests": [{"type": "n"}], "requests": 3}', "requests[0]: expected field t"),
    (b'{"x": ' + b"[" * 100_000, "is not JSON"),
    (PACKED[:-9], "cannot be read"),
    (json.dumps(NESTED).encode(), "expected fewer agents in each other"),
    (b'{"a": "\xff"}', '{"a":"\ufffd"} is of no known kind; read are weka_trace'),
    (b'{"resourceSpans": []}', "OpenTelemetry export; write each conversation as a line {"),
    (b'{"data": [{"payloads": []}]}', "AIPerf's inputs; take each session's last payload"),
    (b'{"trajectory": [], "history": []}', "SWE-agent; take its history (jq -c '{messages: "),
    (b'{"chat_id": 1, "input_length": 9}', "a trace of Bailian; give its times in ms"),
    (b"Timestamp,Model,Request tokens\n5,x,7", "BurstGPT; write each request as a line {"),
    (b"PAR1\x15\x04", "a Parquet file; write its rows as lines"),
]


@pytest.mark.parametrize(("content", "problem"), REFUSED)
def test_what_is_no_recording_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "broken.txt"
    path.write_bytes(content)
    assert problem in refused(path)


def test_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    bad = write(tmp_path, [SESSION, {"messages": 3}, SESSION | {"requests": []}])
    with pytest.raises(WorkloadError, match=r"broken\.json, item [23]: "):
        play(bad, 3)
    (tmp_path / "cut.jsonl.gz").write_bytes(PACKED[:-9])
    workload = play(tmp_path, 3, skip_bad=True)
    assert workload.counts["sessions"] == 3
    assert f"files: 3; {tmp_path}/cut.jsonl.gz cannot be read: " in workload.notes[0]


@pytest.mark.parametrize("block", [512, 16])
def test_requests_become_sessions_that_share_what_their_ids_say(tmp_path: Path, block: int) -> None:
    # The last ids are of incomplete blocks. At 4 and 6 s the first goes on, at 7 s one parts.
    ids = {2: [0, 1, 2, 9], 4: [0, 1, 2, 8], 6: [0, 1, 2, 3, 7], 7: [0, 1, 2, 4, 6, 6]}
    ids |= {3: [0, 1, 9], 5: [0, 1, 5, 8], 8: [20, 21]}
    requests = [
        {"timestamp": 1e3 * at_s, "input_length": block * len(those) - 9 + at_s, "hash_ids": those}
        for at_s, those in ids.items()
    ]
    *alone, (*_, last) = sorted(turns_of(play(write(tmp_path, requests), 5)), key=len)
    assert (last.gap_s, last.reused_tokens, last.output_tokens) == (2, 3 * block, 200)
    shared = []
    for (one,) in alone:
        pairs = zip(one.body()["prompt"], last.body()["prompt"], strict=False)
        shared.append(len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
        assert max((p.tokens for p in {*one.shared} & {*last.shared}), default=0) == shared[-1]
    assert sorted(shared) == [0, 2 * block, 2 * block, 3 * block]


CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{ }"}}]}
PARTS = {"role": "assistant", "content": [{"type": "text", "text": "y" * 9}]}
ASKED = [{"role": "system", "content": "x" * 400}, {"role": "user", "content": "é" * 20}]
CHAT: list[Json] = [*ASKED, CALLED, {"role": "tool", "content": "z" * 6}, PARTS]


@pytest.mark.parametrize("field", ["messages", "traj", "conversations", None])
def test_messages_have_the_lengths_of_their_texts(tmp_path: Path, field: str | None) -> None:
    chat = [*CHAT, {"role": "user", "content": ""}]
    workload = play(write(tmp_path, [{field: chat} if field else chat, {"messages": ASKED}]), 2)
    (alone,), (first, second, *asked) = sorted(turns_of(workload), key=len)
    # A conversation that was recorded is over; a request waits for its answer.
    assert len(asked) == (field in (None, "messages"))
    assert (first.prompt_tokens, second.prompt_tokens) == (118, 118 + 2 + 4 + 2 + 4)
    assert [turn.output_tokens for turn in (first, second, alone)] == [2, 3, 200]
    assert [turn.effective for turn in (first, second, alone)] == [False, True, True]
    assert (first.tool, second.tool, second.gap_s, second.reused_tokens) == ("look", "", 5, 112)
    assert first.shared == second.shared == alone.shared
    assert [part.tokens for part in first.shared] == [104]
    assert any("4 bytes of text for a token" in note for note in workload.notes)


SAID = [{"from": who, "value": "y" * 28} for who in ("human", "gpt", "observation", "gpt")]


def test_sharegpt_is_read_and_a_tokenizer_counts(tmp_path: Path) -> None:
    model = ROOT / "conserve" / "embedded"
    workload = play(write(tmp_path, SAID), tokenizer=model)
    ((first, second),) = turns_of(workload)
    tokens = len(Tokenizer.from_file(str(model / "tokenizer.json")).encode("y" * 28)) + 4
    assert (first.prompt_tokens, second.prompt_tokens) == (tokens, 3 * tokens)
    assert (first.effective, second.effective) == (False, True)


# --- Random edits ---------------------------------------------------------------------------------

REQUEST = b'{"timestamp": 5, "input_length": 1050, "output_length": 9, "hash_ids": [1, 2, 3]}\n'
SHAPES = [TEXT, TEXT + b"\r\n" + TEXT, PACKED, REQUEST + REQUEST.replace(b"1050", b"1540")]
SHAPES += [json.dumps(a).encode() for a in (CHAT, {"messages": CHAT}, [{"conversations": SAID}])]
VALUES = [b"null", b"-1", b"0", b"1e308", b"9" * 30, b"1e999", b'"x\\n"', b"[]", b"{}", b"10000000"]
VALUES += [b"[" * 5_000, b"\xff", b"\x00", b'{"type":"subagent","t":0,"agent_id":"","requests":[']


def edited(content: bytes, draw: random.Random) -> bytes:
    """Put another value, one of those here, or nothing, in the place of a value or some bytes."""
    found = re.finditer(rb'"[^"]*"|[\d.]+|[\[{][^\[\]{}]*[\]}]', content)
    values = [match.span() for match in found] or [(0, 0)]
    at = draw.randrange(len(content) + 1)
    start, end = draw.choice([*values, (at, at + draw.randrange(9)), (at, len(content))])
    other = content[slice(*draw.choice(values))]
    new = draw.choice([draw.choice(VALUES), other, b"", 2 * content[start:end]])
    return content[:start] + new + content[end:]


@pytest.mark.timeout(300)
def test_random_edits_end_in_a_workload_or_in_one_line(tmp_path: Path) -> None:
    refusals = 0
    for seed in range(2_000):
        draw = random.Random(seed)
        path = tmp_path / draw.choice(["trace.json", "trace.jsonl"])
        content = edited(draw.choice(SHAPES), draw)
        path.write_bytes(edited(content, draw) if draw.random() < 0.3 else content)
        kind: Any = draw.choice(["recorded", "recorded", "dialogues"])
        selection = Selection(kind, 3, data=path, skip_bad=draw.choice([None, True]))
        said = ""
        try:
            workload = selection.make(seed)
            assert kind == "dialogues" or list(planned_turns(workload))
        except WorkloadError as error:
            said = str(error)
        assert len(said.splitlines()) <= 1
        refusals += bool(said)
    assert 200 < refusals < 1_800
