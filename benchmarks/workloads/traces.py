"""Reads recorded sessions: one JSON object a file or a line, plain or compressed with gzip.

The format is that of the ``traces`` folder of ``callanjfox/kv-cache-tester``. A session has
``tool_tokens`` and ``system_tokens`` (how its prompts begin; none if not said), a ``block_size``,
and ``requests``. Used are a call's ``t`` (start, s, whole seconds from the session's start), ``in``
and ``out`` (tokens), ``hash_ids`` (one for each whole block of the prompt, the same for the same
tokens after the same history, within the session; one more, for the rest, is left out), ``stop``
(if no call has one, the last one's is taken to be ``end_turn``) and ``api_time`` (s). A
``subagent`` has calls of its own, with times from its own start; one before its parent's first call
is left out, as AIPerf does.
"""

import gzip
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from benchmarks.workloads.plan import WorkloadError, require

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
# A name becomes a part of a request header and of a URL.
_UNNAMED = re.compile("[^A-Za-z0-9_.:-]")
_MOST_NAME_CHARS = 80
_FORMAT = "kv-cache-tester's traces"
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")

T = TypeVar("T")


class Recording(NamedTuple):
    """A recorded session: a file, or a line of one, counted from 1, with its ``content``."""

    path: Path
    line: int = 0
    content: bytes | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One model call.

    Attributes:
        started_s: from the start of the session or sub-agent.
        took_s: as recorded; else an estimate (`estimated`).
        kept_blocks: whole blocks at the prompt's start that are those of the call before.
        new_blocks: ids of the others, an array.
        head_blocks: blocks at the prompt's start that are those of the session's head.
        effective: whether the call ended its turn with the user.
        tool: ``?`` for tools, whose names are not recorded, empty for nothing; None: not recorded.
    """

    started_s: float
    took_s: float
    estimated: bool
    prompt_tokens: int
    output_tokens: int
    kept_blocks: int
    new_blocks: Any
    head_blocks: int
    effective: bool
    tool: str | None = None

    @property
    def ended_s(self) -> float:
        return self.started_s + self.took_s


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """Calls of one agent, in order, and the agents that it started.

    Its prompts begin with ``tool_tokens`` and ``system_tokens``; ``name`` is unique in its file.
    """

    name: str
    block_tokens: int
    tool_tokens: int
    system_tokens: int
    calls: tuple[RecordedCall, ...]
    sub_agents: tuple["SubAgent", ...]


@dataclass(frozen=True, slots=True)
class SubAgent:
    """An agent that another one started after its call ``after``; times from the parent's start.

    ``ended_s`` is None if its parent did not wait for it.
    """

    after: int
    started_s: float
    ended_s: float | None
    session: RecordedSession


class _RawCall(msgspec.Struct, tag="n"):
    t: _Seconds
    prompt: _Positive = msgspec.field(name="in")
    out: _Count
    hash_ids: list[_Count] = []
    stop: str | None = None
    api_time: _Seconds | None = None


class _RawStreamedCall(_RawCall, tag="s"):
    pass


class _RawSubAgent(msgspec.Struct, tag="subagent"):
    t: _Seconds
    agent_id: str
    requests: list["_RawCall | _RawStreamedCall | _RawSubAgent"]
    tool_tokens: _Count = 0
    system_tokens: _Count = 0
    duration_ms: _Seconds | None = None


class _RawSession(msgspec.Struct):
    id: str
    block_size: _Positive
    requests: list[_RawCall | _RawStreamedCall | _RawSubAgent]
    tool_tokens: _Count = 0
    system_tokens: _Count = 0
    hash_id_scope: Literal["local", "global"] = "local"


def recordings(source: Path | Sequence[Path]) -> list[Recording]:
    """Return the recordings in a folder and those below it, or in the files named; sorted."""
    if isinstance(source, Path) and source.is_dir():
        found = (file.relative_to(source) for file in source.rglob("*"))
        files = [
            source / file
            for file in found
            if file.name.lower().endswith(_SUFFIXES)
            and not any(part.startswith(".") for part in file.parts)
        ]
        kinds = ", ".join(f"*{suffix}" for suffix in _SUFFIXES)
        require(bool(files), f"{source} has no recorded sessions ({kinds})")
    else:
        files = [source] if isinstance(source, Path) else list(source)
        require(bool(files), "no recorded sessions are named; name a folder or files")
        for file in files:
            require(file.is_file(), f"{file} is no file; name a folder or recorded sessions")
    return [one for file in sorted(set(files)) for one in _rows(file)]


def _rows(file: Path) -> list[Recording]:
    if not file.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return [Recording(file)]
    lines = enumerate(_content(file).splitlines(), start=1)
    return [Recording(file, number, line) for number, line in lines if line.strip()]


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None
    require(bool(content.strip()), f"{path} is empty")
    return content.removeprefix(b"\xef\xbb\xbf")


def read_json(source: Recording, kind: type[T], form: str) -> T:
    """Read JSON, plain or gzip, as a ``kind``; WorkloadError says where it is not in this form."""
    content = _content(source.path) if source.content is None else source.content
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        # The error quotes what was found, line ends included.
        said = f": {' '.join(str(error).split())}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = f" is not JSON: {error}"
    raise WorkloadError(f"{source}{said}; what is read is the format of {form}")


def read_session(source: Recording) -> RecordedSession:
    """Read one recorded session; WorkloadError names the file, the record, and what is wrong."""
    raw = read_json(source, _RawSession, _FORMAT)
    return _session(raw.id, raw, raw.block_size, f"{source}: requests")


def _session(name: str, raw: _RawSession | _RawSubAgent, block: int, where: str) -> RecordedSession:
    require(bool(raw.requests), f"{where} is empty; a session needs at least one call")
    calls: list[_RawCall] = []
    sub_agents: list[SubAgent] = []
    for index, record in enumerate(raw.requests):
        if isinstance(record, _RawSubAgent):
            agent = _sub_agent(record, len(calls) - 1, block, f"{where}[{index}]")
            sub_agents += [agent] if calls else []
        else:
            _check(record, calls, block, f"{where}[{index}]")
            calls.append(record)
    require(bool(calls), f"{where} has no call of its own")
    if all(call.stop is None for call in calls):
        calls[-1].stop = "end_turn"
    whole = ((call.hash_ids, call.prompt // block) for call in calls)
    blocks = [np.array(ids[:most], dtype=np.int64) for ids, most in whole]
    head = _head(blocks, raw.tool_tokens + raw.system_tokens, block)
    return RecordedSession(
        name=_UNNAMED.sub("_", name)[:_MOST_NAME_CHARS],
        block_tokens=block,
        tool_tokens=raw.tool_tokens,
        system_tokens=raw.system_tokens,
        calls=_calls(calls, blocks, head),
        sub_agents=tuple(sub_agents),
    )


def _sub_agent(raw: _RawSubAgent, after: int, block: int, where: str) -> SubAgent:
    """Read a recorded sub-agent; if it has a duration, its ``t`` is when its result came.

    ``t`` less the duration is within a second of the end of the parent's call before it. One
    without a duration was started in the background: ``t`` is its start, and the parent goes on.
    """
    session = _session(raw.agent_id, raw, block, f"{where}.requests")
    if raw.duration_ms is None:
        return SubAgent(after, raw.t, None, session)
    return SubAgent(after, max(0.0, raw.t - raw.duration_ms / 1e3), raw.t, session)


def _check(call: _RawCall, before: list[_RawCall], block: int, where: str) -> None:
    whole = call.prompt // block
    require(
        len(call.hash_ids) in (whole, -(-call.prompt // block)),
        f"{where}: hash_ids has {len(call.hash_ids)} blocks, but {call.prompt} tokens (in) are "
        f"{whole} whole blocks of {block}",
    )
    if before:
        require(
            call.t >= before[-1].t,
            f"{where}: t is {call.t:g} s, before the call above it ({before[-1].t:g} s)",
        )


def _head(blocks: list[Any], tokens: int, block: int) -> Any:
    """Return the blocks of the session's first ``tokens`` tokens, as most of its calls begin."""
    last = max(min(tokens // block, max(map(len, blocks))), 1) - 1
    long = [ids for ids in blocks if len(ids) > last]
    if not long:
        return np.empty(0, dtype=np.int64)
    ((most, _),) = Counter(int(ids[last]) for ids in long).most_common(1)
    return next(ids for ids in long if ids[last] == most)[: -(-tokens // block)]


def _calls(raw: list[_RawCall], blocks: list[Any], head: Any) -> tuple[RecordedCall, ...]:
    known = [call.api_time for call in raw if call.api_time is not None]
    typical_s = statistics.median(known) if known else 0.0
    calls = []
    before = np.empty(0, dtype=np.int64)
    for index, (call, ids) in enumerate(zip(raw, blocks, strict=True)):
        took_s = call.api_time
        if took_s is None:
            took_s = typical_s
            if index + 1 < len(raw):
                took_s = min(took_s, raw[index + 1].t - call.t)
        kept = _common(before, ids)
        calls.append(
            RecordedCall(
                started_s=call.t,
                took_s=took_s,
                estimated=call.api_time is None,
                prompt_tokens=call.prompt,
                output_tokens=call.out,
                kept_blocks=kept,
                # A copy, so that the whole prompt's ids are not kept alive.
                new_blocks=ids[kept:].copy(),
                head_blocks=_common(head, ids),
                effective=call.stop == "end_turn",
                tool={"tool_use": "?", "end_turn": ""}.get(call.stop or ""),
            )
        )
        before = ids
    return tuple(calls)


def _common(left: Any, right: Any) -> int:
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter
