"""Plans how many prefillers and decoders a workload needs (ConServe, section 4.1).

A prefiller saturates at ``R* = T_p / L_in``. Decoders are provisioned so that it saturates before
they do: ``N T_d >= R L_d`` (1), in tokens a second, and ``N B >= R W`` (2), in live conversations.
"""

import math
from dataclasses import dataclass
from typing import Literal

from autoscale.capacity.profile import CappedPower, Profile
from conserve_lab.capacity.demand import Demand

# From this share on, the plan's assumption of one heavy prefill with a light tail does not hold.
_LATER_SHARE_OF_NOTE = 0.5
# From this share on, a conversation's KV is idle for nearly all of its life.
_GAP_SHARE_OF_NOTE = 0.9
_MAX_REPLICAS = 1_000_000

Provision = Literal["saturation", "rate"]
Constraint = Literal["throughput", "memory"]


class PlanError(ValueError):
    """No number of replicas serves the workload; the message says why."""


@dataclass(frozen=True, slots=True)
class RoleProfiles:
    """Both roles' profiles and power caps; None: the highest cap of a profile with power."""

    prefiller: Profile
    decoder: Profile
    prefiller_cap_w: float | None = None
    decoder_cap_w: float | None = None

    def powers(self) -> tuple[CappedPower | None, CappedPower | None]:
        """Return the power of a prefiller and of a decoder, or None; raises `ProfileError`."""
        return (
            _power(self.prefiller, self.prefiller_cap_w),
            _power(self.decoder, self.decoder_cap_w),
        )


@dataclass(frozen=True, slots=True)
class ConversationCost:
    """The cost of a conversation on these engines; comments name the paper's symbols."""

    prefill_s: float
    decoder_s: float  # With a full batch: its share of decode steps, and appends.
    appends_s: float
    slots: int  # B: conversations at their peak that a decoder holds.
    lifetime_s: float  # W: gaps, prefills, handoff and decode in a full batch, no queueing.
    tbt_s: float
    saturation_per_s: float  # R*: conversations a second at which a prefiller saturates.
    prefill_tokens_per_s: float  # T_p, for these first turns.
    decoder_tokens_per_s: float  # T_d, for this mix.


@dataclass(frozen=True, slots=True)
class Plan:
    """A provisioning, and what to expect of it at ``rate_per_s``.

    Utilisations are shares of time in which an engine computes, however small its batch.
    """

    rate_per_s: float
    provisioned_per_s: float  # The rate that decoders were counted for.
    headroom: float
    prefillers: int
    decoders: int
    cost: ConversationCost
    needed_throughput: float  # Decoders by (1), before rounding up.
    needed_memory: float  # Decoders by (2), before rounding up.
    binding: Constraint
    prefiller_utilisation: float
    decoder_utilisation: float
    slot_utilisation: float  # With lifetimes in full batches.
    overflow_share: float  # Share of time with too few slots, if arrivals are Poisson.
    watts: float | None
    assumptions_broken: tuple[str, ...] = ()  # And what each does to the plan.

    @property
    def joules_per_conversation(self) -> float | None:
        return None if self.watts is None else self.watts / self.rate_per_s


def conversation_cost(
    demand: Demand, profiles: RoleProfiles, *, with_appends: bool = True
) -> ConversationCost:
    """Return what a conversation costs; raises `PlanError` if a decoder cannot hold one.

    Without ``with_appends`` later turns count as if they had no input, the plan's ideal tail.
    """
    prefill, decoder = profiles.prefiller.prefill, profiles.decoder
    capacity = decoder.kv_capacity_tokens
    if demand.longest_peak_tokens > capacity:
        raise PlanError(
            f"a conversation holds {demand.longest_peak_tokens:,} tokens of KV and a decoder "
            f"({decoder.name}) has room for {capacity:,}: no number of decoders serves it; "
            "limit the context, or take decoders with more memory"
        )
    prefill_power, decode_power = profiles.powers()
    slower_prefill = prefill_power.prefill_slowdown if prefill_power else 1.0
    slower_append = decode_power.prefill_slowdown if decode_power else 1.0
    slower_decode = decode_power.decode_slowdown if decode_power else 1.0
    prefill_s = slower_prefill * (
        prefill.constant_s
        + prefill.per_token_s * demand.first_tokens
        + prefill.per_token_squared_s * demand.first_squared
    )
    slots = int(capacity // demand.peak_tokens)
    tbt_s = slower_decode * decoder.decode.step_s(slots, slots * demand.mean_context_tokens)
    appends_s = 0.0
    if with_appends:
        curve = decoder.prefill
        appends_s = (
            slower_append
            * decoder.interference.prefill_share
            * (
                curve.per_token_s * demand.append_tokens
                + curve.per_token_squared_s * demand.append_pairs
                + curve.per_cached_token_s * demand.append_cached
            )
        )
    decoder_s = demand.output_tokens * tbt_s / slots + appends_s
    tokens = demand.decoder_tokens if with_appends else demand.output_tokens
    handoff_s = decoder.handoff.seconds(demand.first_tokens)
    lifetime_s = demand.gap_s + prefill_s + handoff_s + appends_s + demand.output_tokens * tbt_s
    return ConversationCost(
        prefill_s=prefill_s,
        decoder_s=decoder_s,
        appends_s=appends_s,
        slots=slots,
        lifetime_s=lifetime_s,
        tbt_s=tbt_s,
        saturation_per_s=1 / prefill_s,
        prefill_tokens_per_s=demand.first_tokens / prefill_s,
        decoder_tokens_per_s=tokens / decoder_s,
    )


def make_plan(
    demand: Demand,
    profiles: RoleProfiles,
    rate_per_s: float,
    *,
    headroom: float = 0.2,
    prefill_headroom: float = 0.2,
    provision: Provision = "saturation",
) -> Plan:
    """Return the smallest provisioning that satisfies the inequalities.

    Args:
        prefill_headroom: with 0, as in the paper's evaluation, a prefiller's queue has no bound.
        provision: count decoders for the prefillers' saturation, as in the paper, or for the rate.

    Raises:
        PlanError: the rate or headroom is not valid, or no number of replicas is enough.
        ProfileError: a profile lacks the cap.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise PlanError(f"the rate is {rate_per_s:g} conversations/s; give one above 0")
    for name, share in (("headroom", headroom), ("prefill headroom", prefill_headroom)):
        if not (math.isfinite(share) and share >= 0):
            raise PlanError(f"the {name} is {share:g}; give a share from 0, as in 0.2")
    cost = conversation_cost(demand, profiles)
    room = 1 + headroom
    prefillers = _replicas((1 + prefill_headroom) * rate_per_s * cost.prefill_s, "prefillers")
    provisioned = prefillers * cost.saturation_per_s if provision == "saturation" else rate_per_s
    throughput, memory = _needed(cost, room * provisioned)
    decoders = _replicas(max(throughput, memory), "decoders")
    prefiller_use = rate_per_s * cost.prefill_s / prefillers
    decoder_use = _decoder_use(demand, profiles, cost, rate_per_s / decoders)
    live = rate_per_s * cost.lifetime_s
    return Plan(
        rate_per_s=rate_per_s,
        provisioned_per_s=provisioned,
        headroom=headroom,
        prefillers=prefillers,
        decoders=decoders,
        cost=cost,
        needed_throughput=throughput,
        needed_memory=memory,
        binding="throughput" if throughput >= memory else "memory",
        prefiller_utilisation=prefiller_use,
        decoder_utilisation=decoder_use,
        slot_utilisation=live / (decoders * cost.slots),
        overflow_share=_poisson_above(decoders * cost.slots, live),
        watts=_watts(profiles, prefillers, decoders, prefiller_use, decoder_use),
        assumptions_broken=tuple(_broken(demand, profiles, cost, room * provisioned, decoders)),
    )


# Rounding may lift an exact whole number by a few bits.
_ROUNDING = 1e-9


def _replicas(needed: float, what: str) -> int:
    if needed > _MAX_REPLICAS:
        raise PlanError(f"{needed:,.0f} {what} would be needed; ask for a lower rate")
    return max(1, math.ceil(needed * (1 - _ROUNDING)))


def _needed(cost: ConversationCost, rate_per_s: float) -> tuple[float, float]:
    return rate_per_s * cost.decoder_s, rate_per_s * cost.lifetime_s / cost.slots


def _power(profile: Profile, cap_w: float | None) -> CappedPower | None:
    if cap_w is None and not profile.power:
        return None
    return profile.power_at(cap_w)


def _decoder_use(
    demand: Demand, profiles: RoleProfiles, cost: ConversationCost, rate_per_s: float
) -> float:
    """Return the share of time in which a decoder computes, at this rate of conversations.

    Batches are as large as the rate makes them. Conversations on a decoder are assumed to be
    independent.
    """
    _, power = profiles.powers()
    slower = power.decode_slowdown if power else 1.0
    curve, context_tokens = profiles.decoder.decode, demand.mean_context_tokens
    # Sequences that decode together: b = rate x output x TBT(b), which is linear in b.
    tokens_per_s = rate_per_s * demand.output_tokens
    batch = tokens_per_s * slower * curve.step_s(1, context_tokens)
    if batch > 1:
        each_s = curve.per_sequence_s + curve.per_kv_token_s * context_tokens
        grows = tokens_per_s * slower * each_s
        endless = grows >= 1
        batch = math.inf if endless else tokens_per_s * slower * curve.constant_s / (1 - grows)
    batch = min(max(1.0, batch), cost.slots)
    tbt_s = slower * curve.step_s(batch, batch * context_tokens)
    working = rate_per_s * (demand.output_tokens * tbt_s + cost.appends_s)
    live = rate_per_s * (cost.lifetime_s - demand.output_tokens * (cost.tbt_s - tbt_s))
    # Less than one conversation never overlaps with another.
    live = max(1.0, live)
    return float(1 - max(0.0, 1 - working / live) ** live)


def _watts(
    profiles: RoleProfiles, prefillers: int, decoders: int, prefiller_use: float, decoder_use: float
) -> float | None:
    prefill, decode = profiles.powers()
    if prefill is None or decode is None:
        return None
    busy, some = min(1.0, prefiller_use), min(1.0, decoder_use)
    return prefillers * (busy * prefill.prefill_w + (1 - busy) * prefill.idle_w) + decoders * (
        some * decode.decode_w + (1 - some) * decode.idle_w
    )


def _poisson_above(slots: int, mean: float) -> float:
    """Return P(X > slots) for X Poisson with this mean."""
    # Beyond twelve standard deviations a float is 0 or 1.
    far = 12 * math.sqrt(mean) + 12
    if slots > mean + far:
        return 0.0
    terms = (
        math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        for count in range(max(0, int(mean - far)), slots + 1)
    )
    return max(0.0, 1 - math.fsum(terms))


def _broken(
    demand: Demand, profiles: RoleProfiles, cost: ConversationCost, rate_per_s: float, decoders: int
) -> list[str]:
    found = []
    if demand.later_share > _LATER_SHARE_OF_NOTE:
        light = conversation_cost(demand, profiles, with_appends=False)
        without = _replicas(max(_needed(light, rate_per_s)), "decoders")
        found.append(
            f"Later turns carry {demand.later_share:.0%} of the new input tokens, so the tail is "
            f"not light: decoders prefill them, and N is {decoders} instead of the {without} that "
            "the same outputs without appends would need."
        )
    longest = profiles.prefiller.prefill.longest_tokens
    if longest is not None and demand.longest_prompt_tokens > longest:
        found.append(
            f"The longest prompt has {demand.longest_prompt_tokens:,} tokens, and the profile's "
            f"curve ends at {longest:,}: beyond that, times are extrapolated."
        )
    gap_share = demand.gap_s / cost.lifetime_s
    if gap_share > _GAP_SHARE_OF_NOTE:
        busy, memory = _needed(cost, rate_per_s)
        found.append(
            f"Conversations wait for tools and people during {gap_share:.0%} of their lives and "
            f"hold their KV meanwhile: memory asks for {_replicas(memory, 'decoders')} decoders, "
            f"their work for {_replicas(busy, 'decoders')}."
        )
    if cost.slots == 1:
        found.append(
            "A decoder holds a single conversation at its peak: nothing is batched, and decoders "
            "stand idle while tools run."
        )
    return found
