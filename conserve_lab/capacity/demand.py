"""Works out what a workload asks of a cluster, as means over its conversations.

Times on a profile's curves are sums of powers of lengths, so means of these powers give exact mean
times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields


class DemandError(ValueError):
    """A workload lacks something that a plan needs; the message says what."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn's tokens; ``gap_s`` is the time since the previous turn's end."""

    new_tokens: int
    cached_tokens: int
    output_tokens: int
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Means of what a conversation asks of the engines."""

    conversations: int
    turns: float
    first_tokens: float  # The first turn's prompt, L_in of ConServe's section 4.1.
    first_squared: float
    append_tokens: float  # New tokens of all later turns together.
    append_pairs: float  # Sum over later turns of n (n + 2 c), for n new after c cached tokens.
    append_cached: float  # Sum over later turns of c.
    output_tokens: float
    output_context: float  # Sum over output tokens of the KV tokens that each reads.
    gap_s: float
    peak_tokens: float  # The most KV that the conversation ever holds.
    longest_peak_tokens: int  # Of any conversation, as is the next.
    longest_prompt_tokens: int

    @property
    def later_share(self) -> float:
        """The share of new input tokens that later turns bring."""
        return self.append_tokens / (self.first_tokens + self.append_tokens)

    @property
    def decoder_tokens(self) -> float:
        """L_d of ConServe's section 4.1: all outputs, and later turns' new input."""
        return self.append_tokens + self.output_tokens

    @property
    def mean_context_tokens(self) -> float:
        return self.output_context / self.output_tokens


def measure_demand(conversations: Iterable[Sequence[PlannedTurn]]) -> Demand:
    """Return a workload's demand; raises `DemandError` if it has no prompt or output."""
    count = 0
    sums = dict.fromkeys(_MEANS, 0.0)
    longest_peak = longest_prompt = 0
    for turns in conversations:
        if not turns:
            raise DemandError("a conversation of the workload has no turns; leave it out")
        count += 1
        peak = 0
        for number, turn in enumerate(turns):
            new, cached, output = turn.new_tokens, turn.cached_tokens, turn.output_tokens
            prompt = new + cached
            if number:
                sums["append_tokens"] += new
                sums["append_pairs"] += new * (new + 2 * cached)
                sums["append_cached"] += cached
            else:
                sums["first_tokens"] += prompt
                sums["first_squared"] += prompt * prompt
            sums["output_tokens"] += output
            sums["output_context"] += output * (prompt + output / 2)
            sums["gap_s"] += turn.gap_s
            peak = max(peak, prompt + output)
            longest_prompt = max(longest_prompt, prompt)
        sums["turns"] += len(turns)
        sums["peak_tokens"] += peak
        longest_peak = max(longest_peak, peak)
    if not count:
        raise DemandError("the workload has nothing in it: no conversation")
    for name, what in (("first_tokens", "input"), ("output_tokens", "output")):
        if not sums[name]:
            raise DemandError(f"the workload has nothing in it: no {what} tokens")
    means = {name: total / count for name, total in sums.items()}
    return Demand(
        conversations=count,
        longest_peak_tokens=longest_peak,
        longest_prompt_tokens=longest_prompt,
        **means,
    )


_MEANS = tuple(each.name for each in fields(Demand) if each.type is float)
