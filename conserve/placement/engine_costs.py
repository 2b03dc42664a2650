"""How long work takes an engine: as it was measured, or as it is observed."""

from dataclasses import dataclass
from typing import Self

# Before anything is known of an engine: of what two engines would take only the ratio counts.
_ASSUMED_TOKENS_PER_S = 5_000.0
# To take a token from host memory takes this share of the time to compute it: see
# `conserve.pausing.policy`.
_HANDOFF_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The coefficients of an engine's curves (ConServe, section 3.1; figures 2, 3 and 5).

    Attributes:
        per_token_s, per_pair_s, per_cached_token_s: what a prefill adds to an iteration for each
            new token, each pair of a new token and a token before it, and each token found cached.
        prefill_constant_s: what it takes beside that where nothing else runs.
        prefill_share: of a prefill's time, what iterations of running decodes are longer by: 1 if
            nothing overlaps.
        handoff_constant_s, handoff_per_token_s: until KV has come from elsewhere.
        chunk_tokens: most tokens of one iteration.

    Example:
        >>> costs = EngineCosts.observed(tokens_per_s=2000)
        >>> costs.prefill_s(1000), costs.handoff_s(1000)
        (0.5, 0.125)
    """

    per_token_s: float
    per_pair_s: float = 0.0
    per_cached_token_s: float = 0.0
    prefill_constant_s: float = 0.0
    prefill_share: float = 1.0
    handoff_constant_s: float = 0.0
    handoff_per_token_s: float = 0.0
    chunk_tokens: int = 8192

    @classmethod
    def observed(cls, tokens_per_s: float = 0.0) -> Self:
        """Those of an engine of which no profile is known.

        Args:
            tokens_per_s: how fast it has computed prompts of late; 0: not known.
        """
        per_token_s = 1.0 / (tokens_per_s or _ASSUMED_TOKENS_PER_S)
        return cls(per_token_s, handoff_per_token_s=_HANDOFF_SHARE * per_token_s)

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """What a prefill adds to iterations that run anyway; without its constant."""
        pairs = new_tokens * (new_tokens + 2 * cached_tokens)
        return (
            self.per_token_s * new_tokens
            + self.per_pair_s * pairs
            + self.per_cached_token_s * cached_tokens
        )

    def handoff_s(self, tokens: int) -> float:
        """Until KV of so many tokens has come from elsewhere; 0 for none."""
        return self.handoff_constant_s + self.handoff_per_token_s * tokens if tokens > 0 else 0.0
