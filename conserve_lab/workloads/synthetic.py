"""Conversations drawn from the distributions that papers give.

A turn's prompt is the beginning of one series of token ids of its conversation: the previous
prompt, as many stand-in tokens as the previous turn put out, then what is appended. So prompts,
reuse and outputs have exactly the drawn lengths, and KV of an answer is of no use to the next turn.

"Assumed" below means that the paper's text does not say; change it with ``dataclasses.replace``.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from conserve_lab.records import TurnRequest
from conserve_lab.workloads.plan import (
    Arrivals,
    Arriving,
    PlayedScript,
    Turns,
    Workload,
    at_least,
    require,
)
from conserve_lab.workloads.tokens import COMPLETIONS, check_vocabulary, completion, draw, key

# The 95th percentile of the standard normal distribution.
_Z_95 = 1.6449
# PERT's choice: how sharply values gather around the mean.
_PERT_SHAPE = 6


@dataclass(frozen=True, slots=True)
class Spread:
    """Whole numbers between two bounds, with a mean: a beta distribution of PERT's variance."""

    low: int
    mean: float
    high: int

    def __post_init__(self) -> None:
        require(
            0 < self.low <= self.mean <= self.high,
            f"a spread of {self.low} to {self.high} with the mean {self.mean} is none; "
            "give 0 < low <= mean <= high",
        )

    def draw(self, rng: np.random.Generator, count: int) -> Any:
        width = self.high - self.low
        share = (self.mean - self.low) / width if width else 0.0
        if share in (0.0, 1.0):
            return np.full(count, round(self.mean), dtype=np.int64)
        values = rng.beta(_PERT_SHAPE * share, _PERT_SHAPE * (1 - share), count)
        return np.rint(self.low + width * values).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Latency:
    """Log-normal times in seconds, by median and 95th percentile."""

    p50_s: float
    p95_s: float

    def __post_init__(self) -> None:
        require(
            0 < self.p50_s <= self.p95_s < math.inf,
            f"a latency with p50 {self.p50_s} s and p95 {self.p95_s} s is none; "
            "give 0 < p50 <= p95",
        )

    def draw(self, rng: np.random.Generator, count: int) -> Any:
        sigma = math.log(self.p95_s / self.p50_s) / _Z_95
        return rng.lognormal(math.log(self.p50_s), sigma, count)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of conversations.

    Attributes:
        turns: all but the last end in a tool call.
        append_tokens: what a later turn adds after the output before it.
        tool_latency: time between a turn's end and the next turn.
        shared_tokens: the first tokens of every conversation's prompt (a system prompt).
    """

    turns: Spread
    first_prompt_tokens: Spread
    append_tokens: Spread
    output_tokens: Spread
    tool_latency: Latency
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        at_least(0, shared_tokens=self.shared_tokens)


@dataclass(frozen=True, slots=True)
class ConServe(Shape):
    """SWE-agent on SWE-bench, as in *Observation, Not Prediction* (Ding et al.).

    Attributes:
        turns: assumed; with the mean output it makes a conversation's 1,000 output tokens (section
            5.1). Figure 1 shows the first ten turns.
        first_prompt_tokens: 15,000 on average (section 5.1; the prefiller's 25,000 tokens/s and the
            saturation at 1.634 conversations/s of section 5.2 give the same), "tens of thousands"
            (section 3); the bounds are assumed.
        append_tokens: "on the order of hundreds" (section 3); bounds and mean are assumed.
        output_tokens: 1,000 a conversation (section 5.1), "large variance" (section 3); the bounds
            are assumed.
        tool_latency: assumed; tools of SWE-agent are local and light, with low variance
            (ThunderAgent, appendix C).
    """

    turns: Spread = Spread(4, 10, 20)
    first_prompt_tokens: Spread = Spread(8_000, 15_000, 32_000)
    append_tokens: Spread = Spread(50, 300, 1_500)
    output_tokens: Spread = Spread(20, 100, 600)
    tool_latency: Latency = Latency(1.0, 3.0)


@dataclass(frozen=True, slots=True)
class ReAct(Shape):
    """ReAct agents on ToolBench, as in AgentServe.

    Attributes:
        turns: assumed; resume prefills are frequent (section IV-A).
        first_prompt_tokens: cold prefill, 2,500 to 3,500 (table I); the mean is assumed.
        append_tokens: resume prefill, 30 to 127, average 56 (table I).
        output_tokens: decode of Qwen2.5-7B, 21 to 127, average 45 (table I); of Qwen2.5-3B it is
            27 to 99 (37), of Llama3-8B 32 to 101 (38).
        tool_latency: assumed; ToolBench's tools are remote services, whose times have a heavy tail
            (ThunderAgent, appendix C).
    """

    turns: Spread = Spread(3, 8, 15)
    first_prompt_tokens: Spread = Spread(2_500, 3_000, 3_500)
    append_tokens: Spread = Spread(30, 56, 127)
    output_tokens: Spread = Spread(21, 45, 127)
    tool_latency: Latency = Latency(1.0, 10.0)


@dataclass(frozen=True, slots=True)
class PlanAndExecute(Shape):
    """Plan-and-Execute agents on ToolBench, as in AgentServe.

    Attributes:
        turns: assumed; fewer than ReAct's, as resume prefills occur less often (section IV-E).
        first_prompt_tokens: cold prefill, 2,500 to 3,500 (table I); the mean is assumed.
        append_tokens: resume prefill, 125 to 421, average 251 (table I).
        output_tokens: decode of Qwen2.5-7B, 33 to 141, average 62 (table I); of Qwen2.5-3B it is
            41 to 125 (55), of Llama3-8B 22 to 116 (64).
        tool_latency: assumed, as for ReAct.
    """

    turns: Spread = Spread(2, 5, 10)
    first_prompt_tokens: Spread = Spread(2_500, 3_000, 3_500)
    append_tokens: Spread = Spread(125, 251, 421)
    output_tokens: Spread = Spread(33, 62, 141)
    tool_latency: Latency = Latency(1.0, 10.0)


PRESETS: dict[str, Shape] = {
    "conserve": ConServe(),
    "react": ReAct(),
    "plan-and-execute": PlanAndExecute(),
}


@dataclass(frozen=True, slots=True)
class _Turn:
    gap_s: float
    prompt_tokens: int
    reused_tokens: int
    output_tokens: int


def synthetic(
    shape: Shape,
    *,
    conversations: int,
    arrivals: Arrivals,
    vocabulary: range,
    scale_tokens: float = 1.0,
    scale_gaps: float = 1.0,
    max_context_tokens: int | None = None,
    seed: int = 0,
) -> Workload:
    """Conversations of a shape.

    Args:
        vocabulary: token ids to use; it should leave out the model's special tokens.
        scale_tokens: factor for each drawn number of tokens; the product is rounded, to at least 1.
        max_context_tokens: as in `conserve_lab.workloads.replay.Changes`.

    Raises WorkloadError: a setting is wrong, or no conversation fits the context.
    """
    at_least(1, conversations=conversations, max_context_tokens=max_context_tokens)
    at_least(0, seed=seed, scale_gaps=scale_gaps)
    at_least(1e-6, scale_tokens=scale_tokens)
    check_vocabulary(vocabulary)

    def turns_of(index: int) -> tuple[list[_Turn], tuple[_Turn, ...]]:
        # Drawn anew whenever it is needed: a million turns would be hundreds of megabytes.
        drawn = _draw(shape, scale_tokens, scale_gaps, np.random.default_rng([seed, index]))
        return drawn, tuple(_fitting(drawn, max_context_tokens))

    counts = Counter[str]()
    for index in range(conversations):
        drawn, kept = turns_of(index)
        counts["conversations"] += bool(kept)
        counts["turns"] += len(kept)
        counts["conversations_cut"] += 0 < len(kept) < len(drawn)
        counts["conversations_left_out"] += not kept
        counts["turns_left_out"] += len(drawn) - len(kept)
    require(
        counts["conversations"] > 0,
        f"no conversation's first turn fits into {max_context_tokens} tokens; "
        "scale the tokens down",
    )
    shared_tokens = round(shape.shared_tokens * scale_tokens)
    stream = _Stream(vocabulary, key(seed, "shared"), shared_tokens)

    def arrive() -> Iterator[Arriving]:
        times_s = arrivals.times_s()
        for index in range(conversations):
            _, turns = turns_of(index)
            if turns:
                own = key(seed, "conversation", index)
                script = PlayedScript(f"{index:05d}-synthetic", _play(turns, stream, own))
                yield next(times_s), script

    return Workload("synthetic", dict(counts), arrive)


@dataclass(frozen=True, slots=True)
class _Stream:
    vocabulary: range
    shared: int
    shared_tokens: int

    def body(self, own: int, turn: _Turn) -> dict[str, Any]:
        positions = np.arange(turn.prompt_tokens)
        prompt = draw(own, 0, positions, self.vocabulary)
        beginning = positions[: self.shared_tokens]
        prompt[: len(beginning)] = draw(self.shared, 0, beginning, self.vocabulary)
        return completion(prompt, turn.output_tokens)


def _play(turns: tuple[_Turn, ...], stream: _Stream, own: int) -> Turns:
    for turn in turns:
        yield TurnRequest(
            gap_s=turn.gap_s,
            path=COMPLETIONS,
            body=partial(stream.body, own, turn),
            prompt_tokens=turn.prompt_tokens,
            reused_tokens=turn.reused_tokens,
            output_tokens=turn.output_tokens,
            effective=turn is turns[-1],
        )


def _draw(
    shape: Shape, scale_tokens: float, scale_gaps: float, rng: np.random.Generator
) -> list[_Turn]:
    def tokens(spread: Spread, count: int) -> list[int]:
        return [max(1, round(value * scale_tokens)) for value in spread.draw(rng, count).tolist()]

    (count,) = shape.turns.draw(rng, 1).tolist()
    (prompt,) = tokens(shape.first_prompt_tokens, 1)
    appended = [0, *tokens(shape.append_tokens, count - 1)]
    outputs = tokens(shape.output_tokens, count)
    gaps_s = [0.0, *(shape.tool_latency.draw(rng, count - 1) * scale_gaps).tolist()]
    turns: list[_Turn] = []
    for append, output, gap_s in zip(appended, outputs, gaps_s, strict=True):
        before = turns[-1].prompt_tokens if turns else 0
        if turns:
            prompt = before + turns[-1].output_tokens + append
        turns.append(_Turn(gap_s, prompt, before, output))
    return turns


def _fitting(turns: list[_Turn], max_context_tokens: int | None) -> Iterator[_Turn]:
    for turn in turns:
        if max_context_tokens and turn.prompt_tokens + turn.output_tokens > max_context_tokens:
            return
        yield turn
