"""How long work takes an engine, as measured or observed."""

from dataclasses import dataclass, replace
from typing import Self

# Assumed of an unknown engine; its first iterations scale all of it.
_ASSUMED_TOKENS_PER_S = 5_000.0
_ASSUMED_STEP_S = 0.01
_ASSUMED_SEQUENCE_S = 0.0005
# The prompt length at which a token takes twice as long as the first one.
_ASSUMED_PAIR_TOKENS = 50_000
# Taking a token from host memory takes this share of the time to compute it: see
# `conserve.pausing.policy`.
_HANDOFF_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """The coefficients of an engine's curves (ConServe, section 3.1; figures 2, 3 and 5).

    Attributes:
        per_token_s, per_pair_s, per_cached_token_s: what a prefill adds to an iteration for each
            new token, each pair of a new token and one before it, and each token found cached.
        prefill_constant_s: what an iteration of prefills takes besides, if nothing decodes.
        prefill_share: of a prefill's time, what running decodes' iterations are longer by: 1 if
            nothing overlaps.
        chunk_tokens: most tokens of one iteration.
        step_s, per_sequence_s, per_kv_token_s: an iteration of decodes, and what each of them and
            each token of KV that they read adds.
        doubt: standard deviation of a prefill's time, relative to it.
    """

    per_token_s: float
    per_pair_s: float = 0.0
    per_cached_token_s: float = 0.0
    prefill_constant_s: float = 0.0
    prefill_share: float = 1.0
    handoff_constant_s: float = 0.0
    handoff_per_token_s: float = 0.0
    chunk_tokens: int = 8192
    step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    doubt: float = 0.0

    @classmethod
    def assumed(cls) -> Self:
        """Return the costs that are assumed before an engine has taken its first step."""
        per_token_s = 1.0 / _ASSUMED_TOKENS_PER_S
        return cls(
            per_token_s,
            per_pair_s=per_token_s / _ASSUMED_PAIR_TOKENS,
            prefill_constant_s=_ASSUMED_STEP_S,
            handoff_per_token_s=_HANDOFF_SHARE * per_token_s,
            step_s=_ASSUMED_STEP_S,
            per_sequence_s=_ASSUMED_SEQUENCE_S,
            per_kv_token_s=_ASSUMED_SEQUENCE_S / _ASSUMED_PAIR_TOKENS,
            doubt=0.5,
        )

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Return what a prefill adds to iterations that run anyway; without its constant."""
        pairs = new_tokens * (new_tokens + 2 * cached_tokens)
        return (
            self.per_token_s * new_tokens
            + self.per_pair_s * pairs
            + self.per_cached_token_s * cached_tokens
        )

    def handoff_s(self, tokens: int) -> float:
        """Return the seconds until KV has come from elsewhere."""
        return self.handoff_constant_s + self.handoff_per_token_s * tokens if tokens > 0 else 0.0

    def decode_s(self, decodes: float, kv_tokens: float = 0) -> float:
        """Return the seconds of an iteration without a prefill."""
        return self.step_s + self.per_sequence_s * decodes + self.per_kv_token_s * kv_tokens

    def times(self, factor: float) -> Self:
        """Return these costs with all times but those of handoffs multiplied by a factor."""
        return replace(
            self,
            per_token_s=factor * self.per_token_s,
            per_pair_s=factor * self.per_pair_s,
            per_cached_token_s=factor * self.per_cached_token_s,
            prefill_constant_s=factor * self.prefill_constant_s,
            step_s=factor * self.step_s,
            per_sequence_s=factor * self.per_sequence_s,
            per_kv_token_s=factor * self.per_kv_token_s,
        )
