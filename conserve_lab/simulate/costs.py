"""Works out what work costs a simulated engine: a profile's curves, under the role's power cap."""

from dataclasses import dataclass
from typing import Literal

from autoscale.capacity.profile import Profile
from conserve.placement import EngineCosts

Role = Literal["prefiller", "decoder", "collocated"]

# vLLM's default, and the paper's prefiller's chunk (section 5.1).
_DEFAULT_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Costs:
    """One engine's coefficients, in seconds, tokens and watts; linear in what a step comprises.

    A step with ``b`` decodes that read ``k`` tokens of KV takes ``step_s + per_sequence_s b +
    per_kv_token_s k``. A step of prefill alone takes what its chunks add, and ``prefill_s`` for
    each prompt that begins in it, since that was fitted to whole prompts; one that only goes on
    with a prompt takes at least ``step_s``. Beside decodes it takes the decodes' time and
    ``prefill_share`` of what its chunks add (see `autoscale.capacity.profile.Interference`).

    Attributes:
        per_token_s, per_pair_s, per_cached_token_s: what a prefill adds for each new token, each
            pair of a new token and a token before it, and each token found in a cache.
        batched_tokens: most tokens of one step, decodes and prefills' chunks together.
    """

    step_s: float
    per_sequence_s: float
    per_kv_token_s: float
    prefill_s: float
    per_token_s: float
    per_pair_s: float
    per_cached_token_s: float
    prefill_share: float
    handoff_s: float
    handoff_per_token_s: float
    capacity_tokens: int
    batched_tokens: int
    idle_w: float | None = None
    prefill_w: float | None = None
    decode_w: float | None = None

    @classmethod
    def of(cls, profile: Profile, role: Role, cap_w: float | None = None) -> "Costs":
        """Costs of an engine in this role, by default at the profile's highest power cap."""
        prefill, decode, handoff = profile.prefill, profile.decode, profile.handoff
        power = profile.power_at(cap_w) if profile.power or cap_w is not None else None
        # Of the roles, only prefillers hand KV over.
        constant_s = prefill.constant_s if role == "prefiller" else prefill.append_constant_s
        slow_prefill = power.prefill_slowdown if power else 1.0
        slow_decode = power.decode_slowdown if power else 1.0
        return cls(
            step_s=decode.constant_s * slow_decode,
            per_sequence_s=decode.per_sequence_s * slow_decode,
            per_kv_token_s=decode.per_kv_token_s * slow_decode,
            prefill_s=constant_s * slow_prefill,
            per_token_s=prefill.per_token_s * slow_prefill,
            per_pair_s=prefill.per_token_squared_s * slow_prefill,
            per_cached_token_s=prefill.per_cached_token_s * slow_prefill,
            prefill_share=profile.interference.prefill_share,
            handoff_s=handoff.constant_s,
            handoff_per_token_s=handoff.per_token_s,
            capacity_tokens=profile.kv_capacity_tokens,
            batched_tokens=profile.max_batched_tokens.get(role, _DEFAULT_BATCHED_TOKENS),
            idle_w=power.idle_w if power else None,
            prefill_w=power.prefill_w if power else None,
            decode_w=power.decode_w if power else None,
        )

    @property
    def estimated(self) -> EngineCosts:
        return EngineCosts(
            per_token_s=self.per_token_s,
            per_pair_s=self.per_pair_s,
            per_cached_token_s=self.per_cached_token_s,
            prefill_constant_s=self.prefill_s,
            prefill_share=self.prefill_share,
            handoff_constant_s=self.handoff_s,
            handoff_per_token_s=self.handoff_per_token_s,
            chunk_tokens=self.batched_tokens,
            step_s=self.step_s,
            per_sequence_s=self.per_sequence_s,
            per_kv_token_s=self.per_kv_token_s,
        )

    def handoff(self, tokens: int) -> float:
        """Seconds until KV of these tokens has arrived here; 0 for none."""
        return self.handoff_s + self.handoff_per_token_s * tokens if tokens else 0.0
