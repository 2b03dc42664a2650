"""Reads recorded sessions: a JSON object a file, or a line of JSONL; plain or gzip.

The format is that of the ``traces`` folder of ``callanjfox/kv-cache-tester``, which AIPerf reads as
``weka_trace``. A session has ``tool_tokens`` and ``system_tokens`` (how its prompts begin; 0 if
missing), a ``block_size`` (64), and ``requests``. Used are a call's ``t`` (start, s, whole seconds
from the session's start), ``in`` and ``out`` (tokens), ``stop`` and ``api_time`` (s), and
``hash_ids``: one for each whole block of the prompt, the same for the same tokens after the same
history, within the session. Without a ``hash_id_scope``, a sub-agent's ids are its own. A prompt
without ids shares nothing, and an id of a last, incomplete block is not used.

A ``subagent`` has calls of its own, with times from its own start, or as in AIPerf's data sets from
the session's. Both tools skip one without calls, and AIPerf one before its parent's first call.
"""

import codecs
import gzip
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from conserve_lab.workloads.plan import WorkloadError, require
from conserve_lab.workloads.tokens import key

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]

_BLOCK_TOKENS = 64
_WANTED = (
    "recorded sessions are read in the format of kv-cache-tester's traces, "
    "one JSON object a file, or a line of *.jsonl"
)
# Neither hidden files and folders, nor what macOS keeps beside a file (`._*`).
_FILES = re.compile(r"(?i)([^./][^/]*/)*[^./][^/]*\.(json|jsonl|ndjson)(\.gz)?")
_LINES = re.compile(r"(?i).+\.(jsonl|ndjson)(\.gz)?")

T = TypeVar("T")


class Recording(NamedTuple):
    """A file of JSON, or a line of JSONL; errors call it by its name."""

    name: str
    read: Callable[[], bytes]


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

    Its prompts begin with ``tool_tokens`` and ``system_tokens``; ``name`` fits a header or URL.
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
    hash_ids: list[_Count] | None = None
    stop: str | None = None
    api_time: _Seconds | None = None


class _RawStreamedCall(_RawCall, tag="s"):
    pass


class _RawSubAgent(msgspec.Struct, tag="subagent"):
    t: _Seconds
    agent_id: str
    tool_tokens: _Count | None = None
    system_tokens: _Count | None = None
    requests: list["_RawCall | _RawStreamedCall | _RawSubAgent"] | None = None
    duration_ms: _Seconds | None = None


class _RawSession(msgspec.Struct):
    id: str
    requests: list[_RawCall | _RawStreamedCall | _RawSubAgent]
    block_size: _Positive | None = None
    tool_tokens: _Count | None = None
    system_tokens: _Count | None = None
    hash_id_scope: Literal["local", "global", "per_context"] | None = None


def recordings(source: Path | Sequence[Path]) -> list[Recording]:
    """Return the recordings in a folder, its folders included, or in the files named; by path.

    A file alone is JSONL if it is written so, whatever its name.
    """
    if isinstance(source, Path) and source.is_dir():
        inside = (path.relative_to(source) for path in source.rglob("*"))
        files = [source / path for path in inside if _FILES.fullmatch(str(path))]
        require(bool(files), f"{source} has no recordings (*.json or *.jsonl, plain or .gz)")
    else:
        files = [source] if isinstance(source, Path) else list(source)
        require(bool(files), "no recordings are named; name a folder or files")
        for file in files:
            require(file.is_file(), f"{file} is no file; name a folder or recordings")
    files = sorted(set(files))
    return [recording for file in files for recording in _recordings(file, len(files) == 1)]


def _recordings(path: Path, alone: bool) -> list[Recording]:
    lines = _lines(path)
    if _LINES.fullmatch(path.name):
        found = list(lines)
        require(bool(found), f"{path} is empty")
        return found
    first = list(islice(lines, 2)) if alone else []
    if len(first) == 2 and first[0].read().rstrip().endswith(b"}"):
        return [*first, *lines]
    return [Recording(str(path), partial(_read, path))]


def _lines(path: Path) -> Iterator[Recording]:
    start = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                read = partial(_read, path, start)
                if isinstance(file, gzip.GzipFile):  # To seek in it is slow.
                    read = partial(zlib.decompress, zlib.compress(line, 1))
                if not line.isspace():
                    yield Recording(f"{path}, line {number}", read)
                start += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None


def _read(path: Path, line_at: int | None = None) -> bytes:
    with _open(path) as file:
        if line_at is None:
            return file.read()
        file.seek(line_at)
        return file.readline()


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")


def read_json(recording: Recording, kind: Any, wanted: str) -> Any:
    """Read a recording's JSON as a ``kind``; WorkloadError says where it is something else, and
    which format is ``wanted``.
    """
    try:
        content = recording.read().removeprefix(codecs.BOM_UTF8)
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{recording.name} cannot be read: {error}") from None
    require(bool(content.strip()), f"{recording.name} is empty")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        # The error quotes what was found, line ends included.
        raise WorkloadError(f"{recording.name}: {' '.join(str(error).split())}; {wanted}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkloadError(f"{recording.name} is not JSON: {error}; {wanted}") from None


def read_session(recording: Recording) -> RecordedSession:
    """Read one recorded session; WorkloadError names the file, the record, and what is wrong."""
    raw: _RawSession = read_json(recording, _RawSession, _WANTED)
    own = None if raw.hash_id_scope in ("local", "global") else 0
    block = raw.block_size or _BLOCK_TOKENS
    return _session(raw.id, raw, block, f"{recording.name}: requests", own, 0.0)


def _session(
    name: str,
    raw: _RawSession | _RawSubAgent,
    block: int,
    where: str,
    own: int | None,
    start: float,
) -> RecordedSession:
    """Check an agent's records.

    Args:
        own: is added to ids to make them the agent's own; None: they are the session's.
        start: of the agent, in seconds of its records' clock.
    """
    require(bool(raw.requests), f"{where} is empty; a session needs at least one call")
    calls: list[_RawCall] = []
    sub_agents: list[SubAgent] = []
    for index, record in enumerate(raw.requests or ()):
        if not isinstance(record, _RawSubAgent):
            record.t = max(0.0, record.t - start)
            _check(record, calls, block, f"{where}[{index}]")
            calls.append(record)
        elif calls and record.requests:
            its_own = None if own is None else key(own, index) >> 2
            here = f"{where}[{index}].requests"
            sub_agents.append(_sub_agent(record, len(calls) - 1, block, here, its_own, start))
    require(bool(calls), f"{where} has no call of its own")
    blocks = [np.array(call.hash_ids or (), dtype=np.int64) + (own or 0) for call in calls]
    tools, system = raw.tool_tokens or 0, raw.system_tokens or 0
    return RecordedSession(
        name=re.sub(r"[^A-Za-z0-9_.:-]", "_", name)[:80],
        block_tokens=block,
        tool_tokens=tools,
        system_tokens=system,
        calls=_calls(calls, blocks, _head(blocks, tools + system, block)),
        sub_agents=tuple(sub_agents),
    )


def _sub_agent(
    raw: _RawSubAgent, after: int, block: int, where: str, own: int | None, start: float
) -> SubAgent:
    """Read a recorded sub-agent; if it has a duration, its ``t`` is when its result came.

    ``t`` less the duration is within a second of the end of the parent's call before it. One
    without a duration was started in the background: ``t`` is its start, and the parent goes on.
    Where its calls are timed from the session's start, ``t`` is its start as well.
    """
    # Calls' times are rounded to seconds.
    timed_alike = next((call.t for call in raw.requests or ()), 0.0) > max(0.0, raw.t - 1)
    session = _session(raw.agent_id, raw, block, where, own, raw.t if timed_alike else 0.0)
    at_s = max(0.0, raw.t - start)
    if raw.duration_ms is None:
        return SubAgent(after, at_s, None, session)
    took_s = raw.duration_ms / 1e3
    ended_s = at_s + took_s if timed_alike else at_s
    return SubAgent(after, max(0.0, ended_s - took_s), ended_s, session)


def _check(call: _RawCall, before: list[_RawCall], block: int, where: str) -> None:
    whole, rest = divmod(call.prompt, block)
    if call.hash_ids and rest and len(call.hash_ids) == whole + 1:
        call.hash_ids.pop()
    require(
        not call.hash_ids or len(call.hash_ids) == whole,
        f"{where}: hash_ids has {len(call.hash_ids or ())} blocks, but {call.prompt} tokens (in) "
        f"are {whole} whole blocks of {block}",
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
