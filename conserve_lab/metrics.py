"""Works out what a run's turns amount to: latencies, objectives met, goodput, throughput.

Pure functions of `TurnRecord`; all times in seconds. `conserve_lab.latencies` has the latencies.
How each kind of turn counts:

- A turn that *failed* or ran into its time-out has no latency and violates every objective of a
  turn. So does its conversation, which does not count for goodput or session attainment either.
- A turn that was *unfinished* when the run ended has no latency and violates nothing. Its
  conversation, and one cut off in a gap between turns, is counted, and in no latency or rate.
- A completed turn counts among the turns, whatever became of its conversation.
- A completed conversation without a turn for the user has no TTFET and is in no rate of it.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conserve_lab.counters import ServerFigures
from conserve_lab.latencies import (
    LABELS,
    TURN_METRICS,
    Samples,
    Summary,
    by_conversation,
    conversation_outcome,
    known_decode_s,
    latencies_of,
    summarise,
    time_served_s,
    token_gaps,
)
from conserve_lab.objectives import OBJECTIVES, Objectives, Reference
from conserve_lab.records import TurnRecord

SLACK_FACTORS = (1.0, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class Result:
    """A run in figures.

    Attributes:
        duration_s: time from the first request to the last answer; what rates are relative to.
        turns, conversations: number by outcome.
        without_effective: completed conversations that had no turn for the user.
        failures: number of failed turns by kind, the part of the error before its colon.
        latencies: by the names in `LABELS`.
        violations: share of turns or conversations over each bound; empty without bounds.
        attainment: share of finished conversations that met the bounds of `ttft_first` and `tbt`
            (agentserve, section IV-C): with the TTFT of the first turn, and the mean time between
            all output tokens. None without these bounds, or without conversations.
        goodput: conversations a second that finished within ``slack`` times their ideal time, by
            slack (mars, equations 1 and 2; gaps count in both times); empty without a reference.
        total_tokens_per_s: of completed turns, whole prompts included.
        cached_share: share of prompt tokens found in the server's caches; None: it does not say.
        reusable_share: share of prompt tokens that prompts have in common with their conversation's
            previous one; None: the workload does not say.
        servers: completed turns by the replica that answered, where the server says so.
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
    """All figures of one run of one system; ValueError: there are no records."""
    tally = Tally(objectives, unloaded)
    for turns in by_conversation(records).values():
        tally.add(turns)
    return tally.result(energy_j, server)


class Tally:
    """Figures of a run, conversation by conversation, in 8 bytes a latency; records need not be
    kept.

    With ``keep_samples`` it keeps every latency by conversation, as a report has them.
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
        for metric, value in latencies_of(turns):
            self._values[metric].append(value)
            if self.samples is not None:
                self.samples[metric].setdefault(turns[0].conversation, []).append(value)
        if self._unloaded is not None and outcome == "completed":
            for slack in SLACK_FACTORS:
                self._good[slack] += _in_time(turns, self._unloaded, slack)
        if self._objectives is not None:
            self._attain(turns, outcome, self._objectives.bounds_s)

    def result(self, energy_j: float | None = None, server: ServerFigures | None = None) -> Result:
        """All figures of what was added; ValueError: nothing was."""
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
        """Count a session, and whether it kept within both bounds: AgentServe's definition."""
        ttft_s, tbt_s = bounds_s.get("ttft_first"), bounds_s.get("tbt")
        if ttft_s is None or tbt_s is None:
            return
        self._sessions += outcome != "unfinished"
        if outcome == "completed":
            first = turns[0].first_token_s
            in_time = first is None or first - turns[0].sent_s <= ttft_s
            decode_s, gaps = 0.0, 0
            for turn in turns:
                known_s = known_decode_s(turn)
                decode_s += math.fsum(token_gaps(turn)) if known_s is None else known_s
                gaps += len(token_gaps(turn)) if known_s is None else turn.output_tokens - 1
            self._attained += in_time and decode_s <= tbt_s * gaps


@dataclass(slots=True)
class _Share:
    """Some tokens as a share of prompt tokens, over the turns that say how many they are."""

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

    The target is ``slack`` times its gaps and its unloaded waits (equation 2).
    """
    e2e_s = turns[-1].ended_s - turns[0].sent_s
    gaps_s = e2e_s - time_served_s(turns)
    return e2e_s <= slack * (gaps_s + unloaded.ideal_s(turns))


def _kind(record: TurnRecord) -> str:
    if record.outcome == "timeout":
        return "timeout"
    return (record.error or "unknown").partition(":")[0]
