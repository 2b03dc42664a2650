"""A recorded session as it will be sent: see `conserve_lab.workloads.recorded` for the rules."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from conserve_lab.records import SharedPrefix, TurnRequest
from conserve_lab.workloads.plan import at_least
from conserve_lab.workloads.tokens import COMPLETIONS, completion, draw, key
from conserve_lab.workloads.traces import RecordedCall, RecordedSession


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to the recording.

    Attributes:
        max_gap_s: longest gap, after scaling.
        max_context_tokens: the model's context. A conversation ends before the first turn whose
            prompt and output together are longer; a session whose first turn is, is left out.
    """

    scale_tokens: float = 1.0
    scale_gaps: float = 1.0
    max_gap_s: float | None = None
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        at_least(1e-6, scale_tokens=self.scale_tokens)
        at_least(0, scale_gaps=self.scale_gaps, max_gap_s=self.max_gap_s)
        at_least(1, max_context_tokens=self.max_context_tokens)

    def position(self, tokens: Any) -> Any:
        """Return where a position in a recorded prompt moves to: an integer, or an array."""
        return np.floor(np.asarray(tokens) * self.scale_tokens).astype(np.int64)

    def prompt_tokens(self, call: RecordedCall) -> int:
        return max(1, int(self.position(call.prompt_tokens)))

    def output_tokens(self, call: RecordedCall) -> int:
        return max(1, round(call.output_tokens * self.scale_tokens))

    def fits(self, call: RecordedCall) -> bool:
        needed = self.prompt_tokens(call) + self.output_tokens(call)
        return self.max_context_tokens is None or needed <= self.max_context_tokens

    def gap_s(self, recorded_s: float) -> float:
        scaled_s = recorded_s * self.scale_gaps
        return scaled_s if self.max_gap_s is None else min(scaled_s, self.max_gap_s)


class Replay:
    """One agent's conversation as it will be sent; the first ``turns`` of the session's calls."""

    def __init__(
        self, session: RecordedSession, changes: Changes, vocabulary: range, seed: int
    ) -> None:
        at_least(1 / session.block_tokens, scale_tokens=changes.scale_tokens)
        fitting = (index for index, call in enumerate(session.calls) if not changes.fits(call))
        self.session = session
        self.name = re.sub(r"[^A-Za-z0-9_.:-]", "_", session.name)[:80]
        self.turns = next(fitting, len(session.calls))
        self._changes = changes
        self._vocabulary = vocabulary
        self._begins = [
            SharedPrefix(key(seed, one.key), int(changes.position(one.tokens)))
            for one in session.begins
        ]
        self._shared_tokens = self._begins[-1].tokens if self._begins else 0
        children = [Replay(sub.session, changes, vocabulary, seed) for sub in session.sub_agents]
        self.gaps_s, starts_s, self.saved_s = _timeline(session, changes, children)
        # The sub-agents that were started by calls which are made.
        self.children = [
            (start_s, number, child)
            for number, (sub, start_s, child) in enumerate(
                zip(session.sub_agents, starts_s, children, strict=True), start=1
            )
            if sub.after < self.turns and child.turns
        ]
        self._forks = self._find_forks()

    def agents(self, name: str, at_s: float) -> Iterator[tuple[float, str, "Replay"]]:
        """Yield this agent and those it starts: when they arrive, and their names."""
        yield at_s, name, self
        for start_s, number, child in self.children:
            yield from child.agents(f"{name}/{number}-{child.name}", at_s + start_s)

    def tells_apart(self, own: int) -> bool:
        """Whether, with this key, no two prompts share a token more than they should by chance."""
        blocks, shared = self._forks
        first = draw(own, blocks, 0, self._vocabulary)
        first = np.where(shared < 0, first, shared)
        return not np.any(first[:, 0] == first[:, 1]) and all(
            child.tells_apart(own) for *_, child in self.children
        )

    def request(self, own: int, turn: int, blocks: Any) -> TurnRequest:
        call = self.session.calls[turn]
        return TurnRequest(
            gap_s=self.gaps_s[turn],
            path=COMPLETIONS,
            body=partial(self._body, own, turn, blocks),
            prompt_tokens=self._changes.prompt_tokens(call),
            reused_tokens=int(self._changes.position(call.kept_blocks * self.session.block_tokens)),
            output_tokens=self._changes.output_tokens(call),
            effective=call.effective,
            tool=call.tool,
            shared=self._shared_prefixes(call),
        )

    def _body(self, own: int, turn: int, blocks: Any) -> dict[str, Any]:
        call = self.session.calls[turn]
        length = self._changes.prompt_tokens(call)
        ends = self._ends(len(blocks))
        edges = np.append(ends, length)
        sizes = np.diff(edges)
        positions = np.arange(length)
        owners = np.repeat(np.append(blocks, _rest(turn)), sizes)
        prompt = draw(own, owners, positions - np.repeat(edges[:-1], sizes), self._vocabulary)
        shared = self._shared_length(call)
        prompt[:shared] = self._shared(positions[:shared])
        return completion(prompt, self._changes.output_tokens(call))

    def _ends(self, blocks: int) -> Any:
        return self._changes.position(np.arange(blocks + 1) * self.session.block_tokens)

    def _shared_length(self, call: RecordedCall) -> int:
        in_head = int(self._changes.position(call.head_blocks * self.session.block_tokens))
        return min(in_head, self._shared_tokens)

    def _shared_prefixes(self, call: RecordedCall) -> tuple[SharedPrefix, ...]:
        length, start = self._shared_length(call), 0
        parts = []
        for one in self._begins:
            if (end := min(length, one.tokens)) > start:
                parts.append(SharedPrefix(one.key, end))
                start = end
        return tuple(parts)

    def _shared(self, positions: Any) -> Any:
        tokens = np.full(len(positions), -1)
        for one in reversed(self._begins):
            drawn = draw(one.key, 0, positions, self._vocabulary)
            tokens = np.where(positions < one.tokens, drawn, tokens)
        return tokens

    def _find_forks(self) -> tuple[Any, Any]:
        """Return what stands, in either prompt, where one parts from the one before.

        That is ids of blocks, and tokens that come from a shared stream, else -1; in pairs.
        """
        blocks: list[tuple[int, int]] = []
        heads: list[tuple[bool, bool]] = []
        at: list[int] = []
        history = self.session.calls[0].new_blocks
        for turn, (before, call) in enumerate(pairwise(self.session.calls), start=1):
            kept = call.kept_blocks
            left = int(history[kept]) if kept < len(history) else _rest(turn - 1)
            right = int(call.new_blocks[0]) if len(call.new_blocks) else _rest(turn)
            blocks.append((left, right))
            heads.append((kept < before.head_blocks, kept < call.head_blocks))
            at.append(kept)
            history = np.concatenate((history[:kept], call.new_blocks))
        positions = self._changes.position(np.array(at, dtype=np.int64) * self.session.block_tokens)
        in_head = np.array(heads, dtype=bool).reshape(-1, 2)
        shared = in_head & (positions < self._shared_tokens)[:, None]
        tokens = self._shared(positions)[:, None] if len(at) else np.empty((0, 1), dtype=np.int64)
        return (np.array(blocks, dtype=np.int64).reshape(-1, 2), np.where(shared, tokens, -1))


def _rest(turn: int) -> int:
    return -turn - 1


def _timeline(
    session: RecordedSession, changes: Changes, children: Sequence[Replay]
) -> tuple[list[float], list[float], float]:
    """Return each call's gap, each sub-agent's start, and what all changes save, in seconds.

    A call with a tenth of the recorded tokens is taken to last a tenth of the time.
    """
    gaps_s: list[float] = []
    starts_s: list[float] = []
    saved_s = 0.0
    # What the next call waits for: when that ended in the recording, and how long it takes now.
    until_s = wait_s = 0.0
    for turn, call in enumerate(session.calls):
        own_s = max(0.0, call.started_s - until_s)
        gaps_s.append(wait_s + changes.gap_s(own_s))
        before_s = session.calls[turn - 1].ended_s if turn else 0.0
        saved_s += max(0.0, call.started_s - before_s) - gaps_s[-1]
        saved_s += (call.ended_s - call.started_s) * (1 - changes.scale_tokens)
        until_s, wait_s = call.ended_s, 0.0
        for sub, child in zip(session.sub_agents, children, strict=True):
            if sub.after != turn:
                continue
            recorded_s = max(0.0, sub.started_s - call.ended_s)
            start_s = changes.gap_s(recorded_s)
            starts_s.append(call.ended_s - saved_s + start_s)
            if sub.ended_s is not None:
                sooner_s = recorded_s - start_s + child.saved_s
                until_s = max(until_s, sub.ended_s)
                wait_s = max(wait_s, sub.ended_s - call.ended_s - sooner_s)
    return gaps_s, starts_s, saved_s
