"""Reads the profile of the settings: whether it matches what is served, and what work costs."""

import contextlib
from dataclasses import replace
from pathlib import Path

from autoscale.capacity.profile import Profile, ProfileError, load_profile
from conserve.placement import EngineCosts
from conserve.settings import Settings, SettingsError
from conserve.versions import version_of


def with_profile(settings: Settings) -> Settings:
    """Return the settings with their profile's absolute path.

    Raises `SettingsError` if it cannot be read, or is of another model or version.
    """
    if settings.profile is None:
        return settings
    try:
        load_profile(settings.profile).require_serves(settings.model_id, engine_versions())
    except ProfileError as error:
        raise SettingsError(f"profile: {error}") from None
    path = Path(settings.profile)
    if not path.exists():
        return settings
    # The table's process has a different working directory.
    return settings.model_copy(update={"profile": str(path.resolve())})


def profile_off(settings: Settings, dtype: str) -> str:
    """Return `Profile.off_on` of the settings' profile; empty also if that cannot be read."""
    with contextlib.suppress(ProfileError):
        return load_profile(settings.profile).off_on(dtype) if settings.profile else ""
    return ""


def engine_versions() -> dict[str, str | None]:
    """Return the versions of the packages that decide how fast an engine is."""
    return {name: version_of(name) for name in ("vllm", "lmcache")}


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
        per_encoded_token_s=0.0 if profile.encoding is None else profile.encoding.per_token_s,
    )
    chunk_tokens = profile.max_batched_tokens.get("decoder")
    return costs if chunk_tokens is None else replace(costs, chunk_tokens=chunk_tokens)
