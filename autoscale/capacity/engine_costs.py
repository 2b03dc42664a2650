"""Gives a profile's curves to the policies that weigh engines' work."""

from dataclasses import replace

from autoscale.capacity.profile import Profile, load_profile
from conserve.placement import EngineCosts
from conserve.settings import Settings


def engine_costs(settings: Settings) -> EngineCosts | None:
    """Return what work costs these settings' engines, or None; raises `ProfileError`."""
    return None if settings.profile is None else costs_of(load_profile(settings.profile))


def costs_of(profile: Profile) -> EngineCosts:
    """Return what work costs an engine of this profile, under its highest power cap."""
    prefill, decode, handoff = profile.prefill, profile.decode, profile.handoff
    costs = EngineCosts(
        per_token_s=prefill.per_token_s,
        per_pair_s=prefill.per_token_squared_s,
        per_cached_token_s=prefill.per_cached_token_s,
        prefill_constant_s=prefill.append_constant_s,
        prefill_share=profile.interference.prefill_share,
        handoff_constant_s=handoff.constant_s,
        handoff_per_token_s=handoff.per_token_s,
        step_s=decode.constant_s,
        per_sequence_s=decode.per_sequence_s,
        per_kv_token_s=decode.per_kv_token_s,
    )
    chunk_tokens = profile.max_batched_tokens.get("decoder")
    return costs if chunk_tokens is None else replace(costs, chunk_tokens=chunk_tokens)
