"""Every latency of a turn and of a conversation, from `TurnRecord`; all times in seconds.

Definitions (conserve: Ding et al., sections 1 and 5.1):

- TTFT: from sending a turn to the first part of its stream with output. First turns (cold prefill)
  and later ones (appends) are also kept apart.
- TBT of a turn: between consecutive output tokens; its mean, 95th percentile and maximum. Tokens
  that come together have no time between them, so a turn of n tokens has n - 1 times.
- TTFET of a conversation: from sending its first turn to the first token of its first turn whose
  output is for the user, gaps included. Text beside a tool call is not for the user; what a model
  thinks before it answers counts as its turn's first token.
- Last-turn TBT: the mean TBT of a conversation's last turn.
- End to end: from sending the first turn to the last byte of the last.
- TTFET and end to end *less gaps*: without the gaps between turns (tools, the user). Objectives are
  on these: the unloaded reference runs without gaps, and gaps are the workload's.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from conserve_lab.records import TurnRecord

LABELS = {
    "ttft": "TTFT",
    "ttft_first": "TTFT, first turns",
    "ttft_later": "TTFT, later turns",
    "tbt": "TBT, mean of a turn",
    "tbt_p95": "TBT, p95 of a turn",
    "tbt_max": "TBT, longest of a turn",
    "latency": "turn latency",
    "ttfet": "TTFET",
    "ttfet_less_gaps": "TTFET less gaps",
    "last_tbt": "last-turn TBT",
    "e2e": "end to end",
    "e2e_less_gaps": "end to end less gaps",
}
"""Every latency, by the name it has in results; the first seven are of turns."""

TURN_METRICS = tuple(LABELS)[:7]

Samples = dict[str, dict[str, list[float]]]
"""Metric, conversation, values in seconds: one a turn, or one alone for a conversation's own."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A latency's distribution, in seconds. Percentiles are interpolated linearly.

    The geometric mean is of the values above 0: a turn's TBT is 0 when its tokens came in one part.
    """

    count: int
    mean: float
    gmean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarise(values: Sequence[float]) -> Summary:
    array = np.asarray(values, dtype=float)
    p50, p95, p99 = (float(p) for p in np.percentile(array, (50, 95, 99)))
    above = array[array > 0]
    gmean = float(np.exp(np.log(above).mean())) if above.size else 0.0
    return Summary(array.size, float(array.mean()), gmean, p50, p95, p99, float(array.max()))


# --- One conversation -----------------------------------------------------------------------------


def token_gaps(turn: TurnRecord) -> list[float]:
    """Times between a turn's consecutive output tokens; empty with fewer than two, or unknown."""
    if turn.last_token_s is not None:
        return []
    gaps = [later - earlier for earlier, later in pairwise(turn.token_times_s)]
    return gaps + [0.0] * (turn.output_tokens - 1 - len(gaps))


def by_conversation(records: Iterable[TurnRecord]) -> dict[str, list[TurnRecord]]:
    found: dict[str, list[TurnRecord]] = defaultdict(list)
    for record in records:
        found[record.conversation].append(record)
    for turns in found.values():
        turns.sort(key=lambda turn: turn.turn)
    return dict(found)


def conversation_outcome(turns: Sequence[TurnRecord]) -> str:
    if any(turn.outcome in ("failed", "timeout") for turn in turns):
        return "failed"
    return "completed" if turns[-1].last and turns[-1].outcome == "completed" else "unfinished"


def time_served_s(turns: Iterable[TurnRecord]) -> float:
    return sum(turn.ended_s - turn.sent_s for turn in turns)


def _turn_latencies(turn: TurnRecord) -> dict[str, float]:
    found = {"latency": turn.ended_s - turn.sent_s}
    if turn.first_token_s is not None:
        found["ttft"] = turn.first_token_s - turn.sent_s
        found["ttft_first" if turn.turn == 1 else "ttft_later"] = found["ttft"]
    gaps = token_gaps(turn)
    if gaps:
        found["tbt"] = math.fsum(gaps) / len(gaps)
        found["tbt_p95"] = float(np.percentile(gaps, 95))
        found["tbt_max"] = max(gaps)
    elif (decode_s := known_decode_s(turn)) is not None:
        found["tbt"] = decode_s / (turn.output_tokens - 1)
    return found


def known_decode_s(turn: TurnRecord) -> float | None:
    """Seconds from first to last token of a turn whose other tokens' times are not known."""
    if turn.last_token_s is None or turn.first_token_s is None or turn.output_tokens < 2:
        return None
    return turn.last_token_s - turn.first_token_s


def _conversation_latencies(turns: Sequence[TurnRecord]) -> dict[str, float]:
    began_s = turns[0].sent_s
    found = {"e2e": turns[-1].ended_s - began_s, "e2e_less_gaps": time_served_s(turns)}
    last = _turn_latencies(turns[-1])
    if "tbt" in last:
        found["last_tbt"] = last["tbt"]
    for index, turn in enumerate(turns):
        if turn.effective and turn.first_token_s is not None:
            found["ttfet"] = turn.first_token_s - began_s
            found["ttfet_less_gaps"] = (
                time_served_s(turns[:index]) + turn.first_token_s - turn.sent_s
            )
            break
    return found


def samples(records: Iterable[TurnRecord]) -> Samples:
    found: Samples = {metric: {} for metric in LABELS}
    for conversation, turns in by_conversation(records).items():
        for metric, value in latencies_of(turns):
            found[metric].setdefault(conversation, []).append(value)
    return found


def latencies_of(turns: Sequence[TurnRecord]) -> Iterator[tuple[str, float]]:
    for turn in turns:
        if turn.outcome == "completed":
            yield from _turn_latencies(turn).items()
    if conversation_outcome(turns) == "completed":
        yield from _conversation_latencies(turns).items()
