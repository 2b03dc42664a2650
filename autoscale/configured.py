"""The autoscaler that an application's settings describe."""

from autoscale.autoscaler import Autoscaler
from autoscale.capacity.profile import Profile, load_profile
from autoscale.scaling import Limits
from conserve.settings import RoleSettings, Settings
from conserve.wire import Role


def make_autoscaler(settings: Settings) -> Autoscaler:
    """The autoscaler that these settings describe; a role without `max_replicas` stays as it is.

    Raises:
        ProfileError: the profile cannot be read.
    """
    chosen = settings.autoscaling
    limits: dict[Role, Limits] = {}
    start: dict[Role, int] = {"decoder": settings.decoders.replicas}
    roles: list[tuple[Role, RoleSettings]] = [("decoder", settings.decoders)]
    if settings.prefiller_replicas:
        start["prefiller"] = settings.prefillers.replicas
        roles.append(("prefiller", settings.prefillers))
    for role, own in roles:
        if own.max_replicas is not None:
            limits[role] = Limits(
                own.replicas,
                own.max_replicas,
                chosen.target,
                chosen.up_at,
                chosen.down_at,
                chosen.down_delay_s,
                chosen.cool_down_s,
            )
    if not settings.profile:
        return Autoscaler(limits, start, None, chosen.window_s)
    profile = load_profile(settings.profile)
    return Autoscaler(
        limits, start, profile.prefill, chosen.window_s, _prefill_slowdown(settings, profile)
    )


def _prefill_slowdown(settings: Settings, profile: Profile) -> float:
    """Factor by which prefills take longer, under the prefillers' power cap, than profiled."""
    tier = settings.tiers.get(settings.prefillers.tier or "")
    if tier is None or not profile.power:
        return 1.0
    cap_w = tier.power_cap_w
    if tier.power_cap_fraction is not None:
        # The profile's highest cap is the hardware's own limit.
        cap_w = tier.power_cap_fraction * profile.power[0].cap_w
    if cap_w is None:
        return 1.0
    # Between two caps of the profile, the slower.
    known = [power for power in profile.power if power.cap_w <= cap_w + 1] or profile.power[-1:]
    return known[0].prefill_slowdown
