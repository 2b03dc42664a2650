"""What a run's turns amount to: latencies, objectives met, goodput, throughput.

Pure functions of `TurnRecord`; all times in seconds. How each kind of turn counts:

- A turn that *failed* or ran into its time-out has no latency and violates every objective of a
  turn. Its conversation *failed*: it has no latency either, violates every objective of a
  conversation, and does not count for goodput or session attainment.
- A turn that was *unfinished* when the run ended has no latency and violates nothing. Its
  conversation, and one cut off in a gap between turns, is unfinished: counted, and in no latency,
  rate or throughput of conversations.
- A completed turn counts among the turns, whatever became of its conversation.
- A completed conversation without a turn for the user (a recording that ends in a tool call) has
  no TTFET and is in no rate of it; `Result.without_effective` counts these.

What is measured (conserve: Ding et al., sections 1 and 5.1):

- TTFT: from sending a turn to the first part of its stream with output. First turns (cold prefill)
  and later ones (appends) are also kept apart.
- TBT of a turn: between consecutive output tokens; its mean, 95th percentile and maximum. Tokens
  that come together have no time between them, so a turn of n tokens has n - 1 times, however
  few parts it came in. A turn of one token has no TBT.
- TTFET of a conversation: from sending its first turn to the first token of its first turn whose
  output is for the user. Turns before that one, with tool calls, count in full, and so do the gaps
  between them. Text beside a tool call, and what a model thinks before it answers, are no turn of
  their own: the first is not for the user, the second counts as its turn's first token, as in TTFT.
- Last-turn TBT: the mean TBT of a conversation's last turn.
- End to end: from sending the first turn to the last byte of the last.
- The last two times of a conversation *less gaps*: without the gaps between its turns (tools, the
  user), so the time that it waited for the system. Objectives are on these: the unloaded reference
  runs without gaps, and gaps are the workload's, whatever system serves it.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks.counters import ServerFigures
from benchmarks.records import TurnRecord

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
OBJECTIVES = ("ttft_first", "ttft_later", "tbt", "ttfet_less_gaps", "last_tbt", "e2e_less_gaps")
"""The latencies that have a bound."""

SLACK_FACTORS = (1.0, 2.0, 3.0)

Samples = dict[str, dict[str, list[float]]]
"""Metric, conversation, values in seconds: one a turn, or one alone for a conversation's own."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A latency's distribution, in seconds. Percentiles are interpolated linearly.

    The geometric mean is of the values above 0, and 0 without any: a turn's TBT is 0 when its
    tokens came in one part, and would make it 0 for all.
    """

    count: int
    mean: float
    gmean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value."""
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
    """Each conversation's turns, in their order."""
    found: dict[str, list[TurnRecord]] = defaultdict(list)
    for record in records:
        found[record.conversation].append(record)
    for turns in found.values():
        turns.sort(key=lambda turn: turn.turn)
    return dict(found)


def conversation_outcome(turns: Sequence[TurnRecord]) -> str:
    """``completed``, ``failed`` or ``unfinished``."""
    if any(turn.outcome in ("failed", "timeout") for turn in turns):
        return "failed"
    return "completed" if turns[-1].last and turns[-1].outcome == "completed" else "unfinished"


def _served(turns: Iterable[TurnRecord]) -> float:
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
    elif (decode_s := _known_decode_s(turn)) is not None:
        found["tbt"] = decode_s / (turn.output_tokens - 1)
    return found


def _known_decode_s(turn: TurnRecord) -> float | None:
    """From first to last token, of a turn whose other tokens' times are not known."""
    if turn.last_token_s is None or turn.first_token_s is None or turn.output_tokens < 2:
        return None
    return turn.last_token_s - turn.first_token_s


def _conversation_latencies(turns: Sequence[TurnRecord]) -> dict[str, float]:
    began_s = turns[0].sent_s
    found = {"e2e": turns[-1].ended_s - began_s, "e2e_less_gaps": _served(turns)}
    last = _turn_latencies(turns[-1])
    if "tbt" in last:
        found["last_tbt"] = last["tbt"]
    for index, turn in enumerate(turns):
        if turn.effective and turn.first_token_s is not None:
            found["ttfet"] = turn.first_token_s - began_s
            found["ttfet_less_gaps"] = _served(turns[:index]) + turn.first_token_s - turn.sent_s
            break
    return found


def samples(records: Iterable[TurnRecord]) -> Samples:
    """Every latency of every turn and conversation that has one."""
    found: Samples = {metric: {} for metric in LABELS}
    for conversation, turns in by_conversation(records).items():
        for metric, value in _latencies(turns):
            found[metric].setdefault(conversation, []).append(value)
    return found


def _latencies(turns: Sequence[TurnRecord]) -> Iterator[tuple[str, float]]:
    """Every latency of a conversation's turns, and its own."""
    for turn in turns:
        if turn.outcome == "completed":
            yield from _turn_latencies(turn).items()
    if conversation_outcome(turns) == "completed":
        yield from _conversation_latencies(turns).items()


# --- The unloaded reference, and what is derived from it -----------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """What the system does without load: the same workload, one conversation at a time, no gaps.

    Attributes:
        baseline_s: geometric mean of each latency in `OBJECTIVES` that was seen.
        served_s: what each of its conversations took, by id.
        fixed_s, per_new_token_s, per_output_token_s: a least-squares fit of a turn's latency, none
            of them negative; estimates conversations that were not among those measured.
    """

    baseline_s: dict[str, float]
    served_s: dict[str, float]
    fixed_s: float
    per_new_token_s: float
    per_output_token_s: float

    def ideal_s(self, turns: Sequence[TurnRecord]) -> float:
        """How long a conversation would wait for the unloaded system, gaps not counted.

        Measured if it was among the reference's conversations, else estimated from its tokens.
        """
        measured = self.served_s.get(turns[0].conversation)
        if measured is not None:
            return measured
        return sum(
            self.fixed_s + self.per_new_token_s * new + self.per_output_token_s * turn.output_tokens
            for turn, new in zip(turns, _new_tokens(turns), strict=True)
        )


def reference(records: Sequence[TurnRecord]) -> Reference:
    """The reference from a run without load.

    Raises:
        ValueError: no conversation of it completed.
    """
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
        metric: summarise(values).gmean
        for metric in OBJECTIVES
        if (values := _values(seen[metric]))
    }
    rows = [
        (1.0, new, turn.output_tokens)
        for conversation in complete
        for turn, new in zip(conversation, _new_tokens(conversation), strict=True)
    ]
    latencies = [turn.ended_s - turn.sent_s for turn in turns]
    served_s = {conversation[0].conversation: _served(conversation) for conversation in complete}
    return Reference(baseline_s, served_s, *_non_negative_fit(rows, latencies))


def _new_tokens(turns: Sequence[TurnRecord]) -> list[int]:
    # Where the plan does not say what a prompt shares with the one before, it continues it.
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
    request and no interference. The metrics there are TTFET, last-turn TBT and end to end; the
    turns' own TTFT and TBT are judged in the same way here.
    """

    bounds_s: Mapping[str, float]

    @classmethod
    def from_reference(cls, unloaded: Reference, multiple: float = 5.0) -> "Objectives":
        """``multiple`` times the unloaded latencies."""
        return cls({metric: multiple * base for metric, base in unloaded.baseline_s.items()})


# --- A whole run ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """A run in figures.

    Attributes:
        duration_s: from the first request to the last answer; what rates are relative to.
        turns: number of turns by outcome.
        conversations: number of conversations by outcome.
        without_effective: completed conversations that had no turn for the user.
        failures: number of failed turns by kind, the part of the error before its colon.
        latencies: by the names in `LABELS`, those that were seen.
        violations: share of turns or conversations over each bound; empty without bounds.
        attainment: share of sessions (finished conversations) that met both bounds (agentserve,
            section IV-C): the TTFT of the session's first turn, its initial response delay, and
            the mean time between all of its output tokens, against the bounds of `ttft_first` and
            `tbt`. None without these bounds, or without sessions.
        goodput: conversations a second that finished within ``slack`` times their ideal time, by
            slack (mars, equations 1 and 2; gaps count in both times); empty without a reference.
        output_tokens_per_s, total_tokens_per_s: of completed turns; the total counts whole prompts.
        cached_share: of prompt tokens, found in the server's caches; None where it does not say.
        reusable_share: of prompt tokens, what each shares with its conversation's previous one;
            None where the workload does not say.
        servers: completed turns by the replica that answered, where the server says so.
        server: what the server itself counted.
        energy_j, output_tokens_per_j: of the GPUs; None: not available.
    """

    duration_s: float
    turns: dict[str, int]
    conversations: dict[str, int]
    without_effective: int
    failures: dict[str, int]
    latencies: dict[str, Summary]
    output_tokens_per_s: float
    total_tokens_per_s: float
    turns_per_min: float
    conversations_per_min: float
    violations: dict[str, float] = field(default_factory=dict)
    attainment: float | None = None
    goodput: dict[str, float] = field(default_factory=dict)
    cached_share: float | None = None
    reusable_share: float | None = None
    servers: dict[str, int] = field(default_factory=dict)
    server: ServerFigures = field(default_factory=ServerFigures)
    energy_j: float | None = None
    output_tokens_per_j: float | None = None


def evaluate(
    records: Sequence[TurnRecord],
    objectives: Objectives | None = None,
    unloaded: Reference | None = None,
    energy_j: float | None = None,
    server: ServerFigures | None = None,
) -> Result:
    """All figures of one run of one system.

    Raises:
        ValueError: there are no records.
    """
    tally = Tally(objectives, unloaded)
    for turns in by_conversation(records).values():
        tally.add(turns)
    return tally.result(energy_j, server)


class Tally:
    """The figures of a run, conversation by conversation; records need not be kept.

    It keeps 8 bytes a latency and, if asked to, the samples.

    Args:
        objectives, unloaded: what violations and goodput are relative to; None: there are none.
        keep_samples: for a report, which has every latency by conversation.
    """

    def __init__(
        self,
        objectives: Objectives | None = None,
        unloaded: Reference | None = None,
        *,
        keep_samples: bool = False,
    ) -> None:
        self._objectives = objectives
        self._unloaded = unloaded
        self.samples: Samples | None = {metric: {} for metric in LABELS} if keep_samples else None
        self._values = {metric: array("d") for metric in LABELS}
        self._turns: Counter[str] = Counter()
        self._conversations: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._servers: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._good = dict.fromkeys(SLACK_FACTORS, 0)
        self._began_s, self._ended_s = math.inf, -math.inf
        self._prompt_tokens = self._output_tokens = 0
        self._cached, self._reused = _Share(), _Share()
        self._sessions = self._attained = 0

    def add(self, turns: Sequence[TurnRecord]) -> None:
        """Count a conversation: all of its turns, in their order."""
        for turn in turns:
            self._turns[turn.outcome] += 1
            self._began_s = min(self._began_s, turn.sent_s)
            self._ended_s = max(self._ended_s, turn.ended_s)
            if turn.outcome == "completed":
                self._prompt_tokens += turn.prompt_tokens
                self._output_tokens += turn.output_tokens
                self._cached.add(turn.cached_tokens, turn.prompt_tokens)
                self._reused.add(turn.reused_tokens, turn.prompt_tokens)
                if turn.server is not None:
                    self._servers[turn.server] += 1
            elif turn.outcome in ("failed", "timeout"):
                self._failures[_kind(turn)] += 1
                self._failed.update(("ttft_first" if turn.turn == 1 else "ttft_later", "tbt"))
        outcome = conversation_outcome(turns)
        self._conversations[outcome] += 1
        if outcome == "failed":
            self._failed.update(metric for metric in OBJECTIVES if metric not in TURN_METRICS)
        for metric, value in _latencies(turns):
            self._values[metric].append(value)
            if self.samples is not None:
                self.samples[metric].setdefault(turns[0].conversation, []).append(value)
        if self._unloaded is not None and outcome == "completed":
            for slack in SLACK_FACTORS:
                self._good[slack] += _in_time(turns, self._unloaded, slack)
        if self._objectives is not None:
            self._attain(turns, outcome, self._objectives.bounds_s)

    def result(self, energy_j: float | None = None, server: ServerFigures | None = None) -> Result:
        """All figures of what was added.

        Raises:
            ValueError: nothing was.
        """
        if not self._turns:
            raise ValueError("the run has no turns; nothing can be said of it")
        duration_s = self._ended_s - self._began_s
        per_s = 1 / duration_s if duration_s > 0 else 0.0
        completed = self._conversations["completed"]
        tokens = self._output_tokens + self._prompt_tokens
        return Result(
            duration_s=duration_s,
            turns=dict(self._turns),
            conversations=dict(self._conversations),
            without_effective=completed - len(self._values["ttfet"]),
            failures=dict(self._failures),
            latencies={
                metric: summarise(values) for metric, values in self._values.items() if values
            },
            output_tokens_per_s=self._output_tokens * per_s,
            total_tokens_per_s=tokens * per_s,
            turns_per_min=60 * self._turns["completed"] * per_s,
            conversations_per_min=60 * completed * per_s,
            violations=self._violations(),
            attainment=self._attained / self._sessions if self._sessions else None,
            goodput={
                f"{slack:g}": count * per_s
                for slack, count in self._good.items()
                if self._unloaded is not None
            },
            cached_share=self._cached.share(),
            reusable_share=self._reused.share(),
            servers=dict(self._servers),
            server=server or ServerFigures(),
            energy_j=energy_j,
            output_tokens_per_j=self._output_tokens / energy_j if energy_j else None,
        )

    def _violations(self) -> dict[str, float]:
        bounds_s = self._objectives.bounds_s if self._objectives is not None else {}
        rates = {}
        for metric, bound_s in bounds_s.items():
            values, failed = self._values[metric], self._failed[metric]
            if judged := len(values) + failed:
                rates[metric] = (sum(value > bound_s for value in values) + failed) / judged
        return rates

    def _attain(
        self, turns: Sequence[TurnRecord], outcome: str, bounds_s: Mapping[str, float]
    ) -> None:
        """Whether a session kept within both: AgentServe's definition."""
        ttft_s, tbt_s = bounds_s.get("ttft_first"), bounds_s.get("tbt")
        if ttft_s is None or tbt_s is None:
            return
        self._sessions += outcome != "unfinished"
        if outcome == "completed":
            first = turns[0].first_token_s
            in_time = first is None or first - turns[0].sent_s <= ttft_s
            decode_s, gaps = 0.0, 0
            for turn in turns:
                known_s = _known_decode_s(turn)
                decode_s += math.fsum(token_gaps(turn)) if known_s is None else known_s
                gaps += len(token_gaps(turn)) if known_s is None else turn.output_tokens - 1
            self._attained += in_time and decode_s <= tbt_s * gaps


@dataclass(slots=True)
class _Share:
    """Some tokens as a share of prompts', of the turns that say how many these are."""

    tokens: int = 0
    prompt_tokens: int = 0

    def add(self, tokens: int | None, prompt_tokens: int) -> None:
        if tokens is not None:
            self.tokens += tokens
            self.prompt_tokens += prompt_tokens

    def share(self) -> float | None:
        return self.tokens / self.prompt_tokens if self.prompt_tokens else None


def _in_time(turns: Sequence[TurnRecord], unloaded: Reference, slack: float) -> bool:
    """Whether a conversation that finished did so in time: a term of the sum in MARS' equation 1.

    The target is ``slack`` times its ideal time (equation 2): its gaps, which no system can
    shorten, and what it waits for an unloaded system.
    """
    e2e_s = turns[-1].ended_s - turns[0].sent_s
    gaps_s = e2e_s - _served(turns)
    return e2e_s <= slack * (gaps_s + unloaded.ideal_s(turns))


def _kind(record: TurnRecord) -> str:
    if record.outcome == "timeout":
        return "timeout"
    return (record.error or "unknown").partition(":")[0]


def _values(by_conversation: Mapping[str, Sequence[float]]) -> list[float]:
    return [value for values in by_conversation.values() for value in values]
