"""Recorded sessions, and how the format of those without text is read.

It is that of the ``traces`` folder of ``callanjfox/kv-cache-tester``, AIPerf's ``weka_trace``; the
lab's README says what is used of it, and what is assumed. Times of a ``subagent``'s calls are from
its own start, or as in AIPerf's data sets from the session's. Both tools skip one without calls,
and AIPerf one before its parent's first call.
"""

import statistics
from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from conserve_lab.records import SharedPrefix
from conserve_lab.workloads.plan import require
from conserve_lab.workloads.tokens import key

# No model has a longer context. And ten thousand years, in ms.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**7)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
Time = Annotated[float, msgspec.Meta(ge=0, le=3e14)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]

# Assumed where an answer's length is not recorded.
ANSWER_TOKENS = 200
_BLOCK_TOKENS = 64
_MOST_NESTED = 20


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
        tool: ``?`` for one whose name is not recorded, empty for nothing; None: not recorded.
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

    Attributes:
        begins: what its prompts begin with, as other sessions' may, the shortest part first.
        assumed: what the recording does not say, and is taken for it.
        at_s: when it begins, from when the recording does; None: it does not say.
    """

    name: str
    block_tokens: int
    begins: tuple[SharedPrefix, ...]
    calls: tuple[RecordedCall, ...]
    sub_agents: tuple["SubAgent", ...] = ()
    assumed: tuple[str, ...] = ()
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class SubAgent:
    """An agent that another one started after its call ``after``; times from the parent's start.

    ``ended_s`` is None if its parent did not wait for it.
    """

    after: int
    started_s: float
    ended_s: float | None
    session: RecordedSession


class Call(msgspec.Struct, tag="n"):
    t: Time
    prompt: Positive = msgspec.field(name="in")
    out: Count
    hash_ids: list[_Id] | None = None
    stop: str | None = None
    tool: str | None = None
    api_time: Time | None = None


class _StreamedCall(Call, tag="s"):
    pass


class _SubAgent(msgspec.Struct, tag="subagent"):
    t: Time
    agent_id: str
    tool_tokens: Count | None = None
    system_tokens: Count | None = None
    requests: list["Call | _StreamedCall | _SubAgent"] | None = None
    duration_ms: Time | None = None


class Session(msgspec.Struct):
    """A session in the recorded format."""

    id: str
    requests: list[Call | _StreamedCall | _SubAgent]
    block_size: Positive | None = None
    tool_tokens: Count | None = None
    system_tokens: Count | None = None
    hash_id_scope: Literal["local", "global", "per_context"] | None = None


def checked(raw: Session, name: str) -> RecordedSession:
    """Return a session that was read; WorkloadError says which part of this file is wrong."""
    own = None if raw.hash_id_scope in ("local", "global") else 0
    return _session(raw.id, raw, raw.block_size or _BLOCK_TOKENS, f"{name}: requests", own, 0.0)


def _session(
    name: str, raw: Session | _SubAgent, block: int, where: str, own: int | None, start: float
) -> RecordedSession:
    """Check an agent's records.

    Args:
        own: is added to ids to make them the agent's own; None: they are the session's.
        start: of the agent, in seconds of its records' clock.
    """
    require(bool(raw.requests), f"{where}: expected at least one call, found none")
    require(where.count("].") < _MOST_NESTED, f"{where}: expected fewer agents in each other")
    calls: list[Call] = []
    sub_agents: list[SubAgent] = []
    for index, record in enumerate(raw.requests or ()):
        if not isinstance(record, _SubAgent):
            record.t = max(0.0, record.t - start)
            _check(record, calls, block, f"{where}[{index}]")
            calls.append(record)
        elif calls and record.requests:
            its_own = None if own is None else key(own, index) >> 2
            here = f"{where}[{index}].requests"
            sub_agents.append(_sub_agent(record, len(calls) - 1, block, here, its_own, start))
    require(bool(calls), f"{where}: expected a call of its own, found sub-agents alone")
    blocks = [np.array(call.hash_ids or (), dtype=np.int64) + (own or 0) for call in calls]
    tools = SharedPrefix(key("tools", raw.tool_tokens or 0), raw.tool_tokens or 0)
    tokens = tools.tokens + (raw.system_tokens or 0)
    begins = tools, SharedPrefix(key("tools and system prompt", tools.tokens, tokens), tokens)
    made = calls_of(calls, blocks, _head(blocks, tokens, block))
    return RecordedSession(name, block, begins, made, tuple(sub_agents))


def _sub_agent(
    raw: _SubAgent, after: int, block: int, where: str, own: int | None, start: float
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


def _check(call: Call, before: list[Call], block: int, where: str) -> None:
    whole, rest = divmod(call.prompt, block)
    if call.hash_ids and rest and len(call.hash_ids) == whole + 1:
        call.hash_ids.pop()
    found = len(call.hash_ids or ())
    expected = f"expected {whole} whole blocks of {block}, as in is {call.prompt}"
    require(found in (0, whole), f"{where}.hash_ids: {expected}, found {found}")
    least_s = before[-1].t if before else 0.0
    expected = f"expected at least {least_s:g} s, as in the call above"
    require(call.t >= least_s, f"{where}.t: {expected}, found {call.t:g} s")


def _head(blocks: list[Any], tokens: int, block: int) -> Any:
    """Return the blocks of the session's first ``tokens`` tokens, as most of its calls begin."""
    last = max(min(tokens // block, max(map(len, blocks))), 1) - 1
    long = [ids for ids in blocks if len(ids) > last]
    if not long:
        return np.empty(0, dtype=np.int64)
    ((most, _),) = Counter(int(ids[last]) for ids in long).most_common(1)
    return next(ids for ids in long if ids[last] == most)[: -(-tokens // block)]


def calls_of(raw: list[Call], blocks: list[Any], head: Any) -> tuple[RecordedCall, ...]:
    """Return calls, given the ids of their whole blocks, and those of the session's head."""
    known = [call.api_time for call in raw if call.api_time is not None]
    typical_s = statistics.median(known) if known else 0.0
    calls = []
    before = np.empty(0, dtype=np.int64)
    ends_s = [*(call.t for call in raw[1:]), inf]
    for call, ids, end_s in zip(raw, blocks, ends_s, strict=True):
        took_s = min(typical_s, end_s - call.t) if call.api_time is None else call.api_time
        kept = common(before, ids)
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
                head_blocks=common(head, ids),
                effective=call.stop == "end_turn",
                tool=call.tool or {"tool_use": "?", "end_turn": ""}.get(call.stop or ""),
            )
        )
        before = ids
    return tuple(calls)


def common(left: Any, right: Any) -> int:
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter
