"""Derives bounds from what the system does without load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from conserve_lab.latencies import (
    by_conversation,
    conversation_outcome,
    samples,
    summarise,
    time_served_s,
)
from conserve_lab.records import TurnRecord

OBJECTIVES = ("ttft_first", "ttft_later", "tbt", "ttfet_less_gaps", "last_tbt", "e2e_less_gaps")
"""The latencies that have a bound."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The system without load: the same workload, one conversation at a time, no gaps.

    Attributes:
        baseline_s: geometric mean of each latency in `OBJECTIVES` that was seen.
        served_s: how long each of its conversations took, by id.
        fixed_s, per_new_token_s, per_output_token_s: a non-negative least-squares fit of a turn's
            latency, which estimates other conversations.
    """

    baseline_s: dict[str, float]
    served_s: dict[str, float]
    fixed_s: float
    per_new_token_s: float
    per_output_token_s: float

    def ideal_s(self, turns: Sequence[TurnRecord]) -> float:
        """How long a conversation would wait for the unloaded system, gaps not counted: measured or
        estimated.
        """
        measured = self.served_s.get(turns[0].conversation)
        if measured is not None:
            return measured
        return sum(
            self.fixed_s + self.per_new_token_s * new + self.per_output_token_s * turn.output_tokens
            for turn, new in zip(turns, _new_tokens(turns), strict=True)
        )


def reference(records: Sequence[TurnRecord]) -> Reference:
    """Make the reference from a run without load; ValueError: no conversation of it completed."""
    complete = [
        turns
        for turns in by_conversation(records).values()
        if conversation_outcome(turns) == "completed"
    ]
    if not complete:
        raise ValueError("no conversation of the unloaded run completed; there is no reference")
    turns = [turn for conversation in complete for turn in conversation]
    seen = samples(turns)
    baseline_s = {
        metric: summarise(list(chain.from_iterable(seen[metric].values()))).gmean
        for metric in OBJECTIVES
        if seen[metric]
    }
    rows = [
        (1.0, new, turn.output_tokens)
        for conversation in complete
        for turn, new in zip(conversation, _new_tokens(conversation), strict=True)
    ]
    latencies = [turn.ended_s - turn.sent_s for turn in turns]
    served_s = {
        conversation[0].conversation: time_served_s(conversation) for conversation in complete
    }
    return Reference(baseline_s, served_s, *_non_negative_fit(rows, latencies))


def _new_tokens(turns: Sequence[TurnRecord]) -> list[int]:
    # Where the plan does not say what a prompt shares with the one before, it is taken to
    # continue it.
    previous = [0, *(turn.prompt_tokens for turn in turns)]
    return [
        max(0, turn.prompt_tokens - (before if turn.reused_tokens is None else turn.reused_tokens))
        for turn, before in zip(turns, previous, strict=False)
    ]


def _non_negative_fit(
    rows: Sequence[Sequence[float]], values: Sequence[float]
) -> tuple[float, float, float]:
    matrix, target = np.asarray(rows, dtype=float), np.asarray(values, dtype=float)
    kept = [0, 1, 2]
    while True:
        # Columns of very different size: scaled, so that none is taken for noise.
        scale = np.maximum(np.abs(matrix[:, kept]).max(axis=0), 1e-12)
        solution = np.linalg.lstsq(matrix[:, kept] / scale, target, rcond=None)[0] / scale
        if solution.min() >= 0:
            break
        del kept[int((solution * scale).argmin())]
    fitted = [0.0, 0.0, 0.0]
    for column, value in zip(kept, solution, strict=True):
        fitted[column] = float(value)
    return fitted[0], fitted[1], fitted[2]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in seconds, by the names in `OBJECTIVES`; a latency without one is not judged.

    Conserve (section 5.3) sets each metric's bound at 5 times its baseline, measured with a single
    request and no interference. Its metrics are TTFET, last-turn TBT and end to end; the turns' own
    TTFT and TBT are judged in the same way here.
    """

    bounds_s: Mapping[str, float]

    @classmethod
    def from_reference(cls, unloaded: Reference, multiple: float = 5.0) -> "Objectives":
        return cls({metric: multiple * base for metric, base in unloaded.baseline_s.items()})
