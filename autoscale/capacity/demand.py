"""Works out what a workload asks of a cluster: means over its conversations.

Times on a profile's curves are sums of powers of lengths, so means of these powers give mean
times exactly, without the conversations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class DemandError(ValueError):
    """A workload says too little to plan for; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn: what is prefilled, what is found in a cache, what is put out.

    Attributes:
        gap_s: time between the previous turn's end and this one.
    """

    new_tokens: int
    cached_tokens: int
    output_tokens: int
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Tells what one conversation asks of the engines, in the mean.

    Attributes:
        conversations: how many these are means of.
        first_tokens: the first turn's prompt: L_in of ConServe's section 4.1.
        first_squared: the square of that.
        append_tokens: new tokens of all later turns together.
        append_pairs: sum over later turns of n (n + 2 c), for n new tokens after c cached ones:
            what the quadratic term counts.
        append_cached: sum over later turns of c.
        output_tokens: output of all turns together.
        output_context: sum, over all output tokens, of the KV tokens that each of them reads.
        gap_s: all gaps together: tools, and people.
        peak_tokens: the most KV that the conversation ever holds.
        longest_peak_tokens: the most KV that any conversation ever holds.
        longest_prompt_tokens: the longest prompt of any turn of any conversation.
    """

    conversations: int
    turns: float
    first_tokens: float
    first_squared: float
    append_tokens: float
    append_pairs: float
    append_cached: float
    output_tokens: float
    output_context: float
    gap_s: float
    peak_tokens: float
    longest_peak_tokens: int
    longest_prompt_tokens: int

    @property
    def later_share(self) -> float:
        """The share of all new input tokens that later turns carry."""
        return self.append_tokens / (self.first_tokens + self.append_tokens)

    @property
    def decoder_tokens(self) -> float:
        """L_d of ConServe's section 4.1: every turn's decode, and later turns' prefills."""
        return self.append_tokens + self.output_tokens

    @property
    def mean_context_tokens(self) -> float:
        """KV that an output token reads, in the mean."""
        return self.output_context / self.output_tokens


def measure_demand(conversations: Iterable[Sequence[PlannedTurn]]) -> Demand:
    """The demand of a workload: means over its conversations.

    Raises:
        DemandError: there is none, or one has no turns, no prompt or no output.
    """
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


_MEANS = (
    "turns",
    "first_tokens",
    "first_squared",
    "append_tokens",
    "append_pairs",
    "append_cached",
    "output_tokens",
    "output_context",
    "gap_s",
    "peak_tokens",
)
