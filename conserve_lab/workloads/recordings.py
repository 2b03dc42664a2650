"""Recordings of a running application: how they are written, and read as sessions.

A file has a head, then a turn a line. A turn's prompt is digests of its blocks, each of all before
it too: first how many it has in common with its history's turn above, then the others.
"""

import base64
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from conserve_lab.workloads import traces
from conserve_lab.workloads.files import Recording, Skipped, read_json, skipping
from conserve_lab.workloads.mooncake import beginnings
from conserve_lab.workloads.plan import WorkloadError, require

VERSION, _DIGEST_BYTES = 1, 8
# Histories whose last prompt is kept, so that the next line is short.
_MOST_HISTORIES = 4096
_History = tuple[str, int]


class RecordingFile:
    """A file that is written, readable to its owner alone; OSError if it cannot be.

    When it is half as large as both may be, it is renamed to FILE.1, whose last one goes. Ids and
    digests are salted once more: no other file has the same ones, and nothing can be looked up.
    """

    def __init__(self, path: Path, most_bytes: int, *, anonymous_tools: bool = False) -> None:
        self.path, self.turns, self.dropped = path, 0, 0
        self._most_bytes, self._anonymous = most_bytes // 2, anonymous_tools
        self._salt = secrets.token_bytes(32)
        self._tools: dict[str, str] = {}
        self._before: OrderedDict[_History, bytes] = OrderedDict()
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        self._before.clear()
        self._bytes = 0
        return open(self.path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600))

    def write(self, page: dict[str, Any]) -> None:
        """Write an answer of `GET /v1/recording`."""
        head = {"conserve_recording": VERSION, "model": page["model"]}
        head |= {"block_tokens": page["block_tokens"]} | page["deployment"]
        if not self._bytes:
            self._add(head)
        if page["dropped"] > self.dropped:
            self._add({"dropped": page["dropped"] - self.dropped})
        self.dropped = page["dropped"]
        for turn in page["turns"]:
            if self._bytes >= self._most_bytes:
                self._file.close()
                os.replace(self.path, f"{self.path}.1")
                self._file = self._open()
                self._add(head)
            self._add(self._turn(turn))
            self.turns += 1
        self._file.flush()

    def _add(self, line: dict[str, Any]) -> None:
        self._bytes += self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        told = {name: value for name, value in turn.items() if value not in (None, False, 0, "")}
        told["at"], told["tool"] = round(turn["at"], 3), turn["tool"]
        for name in {"conversation", "parent"} & told.keys():
            told[name] = self._digests(told[name]).hex()
        if self._anonymous and turn["tool"]:
            told["tool"] = self._tools.setdefault(turn["tool"], f"tool-{len(self._tools) + 1}")
        for name in {"ttft_s", "ttfet_s", "latency_s", "idle_s"} & told.keys():
            told[name] = round(told[name], 4)
        blocks = self._digests(told.pop("blocks", ""))
        history = told["conversation"], turn["history"] or 0
        before = self._before.pop(history, b"")
        shared = traces.common(*(np.frombuffer(one, dtype="<i8") for one in (before, blocks)))
        self._before[history] = blocks
        if len(self._before) > _MOST_HISTORIES:
            self._before.popitem(last=False)
        return told | {"shared": shared, "blocks": blocks[shared * _DIGEST_BYTES :].hex()}

    def _digests(self, encoded: str) -> bytes:
        packed, size = base64.b64decode(encoded), _DIGEST_BYTES
        each = (packed[at : at + size] for at in range(0, len(packed), size))
        return b"".join(blake2b(one, digest_size=size, key=self._salt).digest() for one in each)

    def close(self) -> None:
        self._file.close()


# --- As sessions ----------------------------------------------------------------------------------


class Head(msgspec.Struct):
    """How a recording begins; what was deployed then."""

    conserve_recording: int
    block_tokens: traces.Positive
    model: str
    placement: str = "elastic"
    parks: bool = False
    profile: str | None = None
    # Role, whether it hosts, tokens of KV space, tokens of its node's host memory.
    engines: list[tuple[str, bool, int, int]] = []
    nodes: traces.Positive = 1


class Turn(msgspec.Struct, kw_only=True):
    """A recorded turn; `conserve.turn.TurnStats` has the fields of this name."""

    conversation: str
    at: traces.Time
    history: int = 0
    parent: str | None = None
    outcome: str | None = None
    prompt_tokens: traces.Count = 0
    output_tokens: traces.Count = 0
    decoder_cached_tokens: traces.Count = 0
    lmcache_tokens: traces.Count = 0
    remote_tokens: traces.Count = 0
    ttft_s: float | None = None
    ttfet_s: float | None = None
    latency_s: traces.Time = 0.0
    tool: str | None = None
    shared: traces.Count = 0
    blocks: str = ""


class _Dropped(msgspec.Struct):
    dropped: int


_KINDS = {"conserve_recording": Head, "conversation": Turn, "dropped": _Dropped}


def read_turns(
    lines: Sequence[Recording], skipped: Skipped = None
) -> tuple[Head, list[tuple[Turn, Any]]]:
    """Return a recording's head and its turns, each with the digests of its blocks as an array."""
    head: Head | None = None
    turns: list[tuple[Turn, Any]] = []
    before: dict[_History, Any] = {}
    for line in lines:
        with skipping(skipped):
            read = read_json(line, _KINDS)
            if isinstance(read, Head):
                found = read.conserve_recording
                problem = f"conserve_recording: expected {VERSION}, found {found}"
                require(found == VERSION, f"{line.name}: {problem}; read it with a newer ConServe")
                head = head or read
            elif isinstance(read, Turn):
                blocks = _blocks(read, line.name, before.get((read.conversation, read.history)))
                before[read.conversation, read.history] = blocks
                turns.append((read, blocks))
    if head is None:
        raise WorkloadError(f"{lines[0].name}: a recording begins with conserve_recording")
    return head, turns


def _blocks(turn: Turn, name: str, before: Any) -> Any:
    try:
        own = np.frombuffer(bytes.fromhex(turn.blocks), dtype="<i8")
    except ValueError:
        raise WorkloadError(f"{name}: blocks: expected digests of 16 hexadecimal digits") from None
    has = 0 if before is None else len(before)
    expected = f"expected at most {has}, as its history's turn above has"
    require(turn.shared <= has, f"{name}: shared: {expected}, found {turn.shared}")
    return own if before is None else np.concatenate((before[: turn.shared], own))


def sessions_of(lines: Sequence[Recording], skipped: Skipped) -> Iterator[traces.RecordedSession]:
    """Yield the sessions of a recording: conversations that no other of its began."""
    head, turns = read_turns(lines, skipped)
    histories: dict[_History, list[tuple[Turn, Any]]] = {}
    for turn, blocks in sorted(turns, key=lambda one: one[0].at):
        if turn.prompt_tokens:
            histories.setdefault((turn.conversation, turn.history), []).append((turn, blocks))
    began_s = min((turn.at for turn, _ in turns), default=0.0)
    block = head.block_tokens
    longest = [max((blocks for _, blocks in each), key=len).tolist() for each in histories.values()]
    begun = dict(zip(histories, beginnings(longest, block), strict=True))
    # The first history of each conversation, and those that others began.
    firsts: dict[str, _History] = {}
    children: dict[_History, list[_History]] = {}
    roots: list[_History] = []
    for one, ((first, _), *_) in histories.items():
        parent = firsts.get(one[0]) or firsts.get(first.parent or "")
        firsts.setdefault(one[0], one)
        (roots if parent is None else children.setdefault(parent, [])).append(one)

    def session(one: _History) -> traces.RecordedSession:
        made, first_s = histories[one], histories[one][0][0].at
        raw = [_call(turn, first_s) for turn, _ in made]
        begins, shared = begun[one]
        blocks = [ids[: call.prompt // block] for call, (_, ids) in zip(raw, made, strict=True)]
        subs = tuple(sub_agent(made, session(child)) for child in children.get(one, ()))
        calls = traces.calls_of(raw, blocks, shared)
        return traces.RecordedSession(
            f"{one[0]}-{one[1]}", block, begins, calls, subs, at_s=first_s - began_s
        )

    def sub_agent(
        parents: list[tuple[Turn, Any]], child: traces.RecordedSession
    ) -> traces.SubAgent:
        first_s, at_s = parents[0][0].at, began_s + (child.at_s or 0.0)
        done = [turn.at + turn.latency_s <= at_s for turn, _ in parents]
        after = max((place for place, is_done in enumerate(done) if is_done), default=0)
        ended_s = at_s + max(call.ended_s for call in child.calls)
        waited = after + 1 < len(parents) and parents[after + 1][0].at >= ended_s
        return traces.SubAgent(after, at_s - first_s, ended_s - first_s if waited else None, child)

    for root in roots:
        yield session(root)


def _call(turn: Turn, first_s: float) -> traces.Call:
    stop = None if turn.tool is None else "tool_use" if turn.tool else "end_turn"
    at_s, tokens = turn.at - first_s, turn.prompt_tokens
    return traces.Call(
        at_s, tokens, turn.output_tokens, None, stop, turn.tool or None, turn.latency_s
    )
