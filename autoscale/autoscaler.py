"""Decides both roles' numbers of replicas, from what the conversation table observes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autoscale.capacity.profile import PrefillCurve, Profile, load_profile
from autoscale.scaling import Limits, Scaling, scale
from autoscale.signals import ConversationFlow, Need, Pool, PrefillLoad
from conserve.placement import Decoder, Prefiller
from conserve.settings import RoleSettings, Settings
from conserve.wire import Role


@dataclass(slots=True)
class Wanted:
    """The last decision for a role, and the signal behind it; for `/metrics`."""

    scaling: Scaling
    need: Need | None = None


class Autoscaler:
    """Decides how many replicas of each role to run; roles without ``limits`` stay as they are.

    Rates are averaged over ``window_s``. To scale prefillers it needs their ``curve``, whose times
    a
    power cap multiplies by ``prefill_slowdown``.
    """

    def __init__(
        self,
        limits: dict[Role, Limits],
        start: dict[Role, int],
        curve: PrefillCurve | None,
        window_s: float,
        prefill_slowdown: float = 1.0,
    ) -> None:
        if "prefiller" in limits and curve is None:
            raise ValueError("prefillers are scaled by the profiled curve, and there is none")
        self._limits = limits
        self._load = PrefillLoad(curve, window_s, prefill_slowdown) if curve is not None else None
        self._flow = ConversationFlow(window_s)
        self.wanted = {role: Wanted(Scaling(replicas)) for role, replicas in start.items()}

    def prompt_sent(self, input_tokens: int, now_s: float) -> None:
        """Count a first turn that went to a prefiller."""
        if self._load is not None:
            self._load.arrived(input_tokens, now_s)

    def conversation_bound(self, now_s: float) -> None:
        """Count a new conversation that was bound to a decoder."""
        self._flow.arrived(now_s)

    def conversation_ended(self, lifetime_s: float, held_tokens: int) -> None:
        self._flow.ended(lifetime_s, held_tokens)

    def adopt(self, role: Role, replicas: int, now_s: float) -> None:
        """Take over a predecessor's number of replicas, as if decided now."""
        limits, before = self._limits.get(role), self.wanted[role].scaling
        if limits is not None and before.replicas < replicas <= limits.most:
            self.wanted[role].scaling = Scaling(replicas, now_s, None, "as before")

    def replicas(self, role: Role) -> int:
        return self.wanted[role].scaling.replicas

    def decide(
        self,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        waiting_tokens: float,
        now_s: float,
    ) -> list[Role]:
        """Update the numbers of replicas, and return the roles whose number has changed.

        Leaving engines count, too, and a prefiller that hosts conversations is in both lists.
        ``waiting_tokens`` are prompts of conversations for which no decoder has room.
        """
        prefillers = list(prefillers)
        needs: dict[Role, Need | None] = {
            "decoder": self._decoders_needed(list(decoders), prefillers, waiting_tokens, now_s),
            "prefiller": self._prefillers_needed(prefillers, now_s),
        }
        changed: list[Role] = []
        for role, wanted in self.wanted.items():
            wanted.need = need = needs[role]
            limits = self._limits.get(role)
            if limits is None:
                continue
            after = scale(limits, wanted.scaling, None if need is None else need.replicas, now_s)
            if after.replicas != wanted.scaling.replicas:
                changed.append(role)
            wanted.scaling = after
        return changed

    def _decoders_needed(
        self,
        decoders: list[Decoder],
        prefillers: list[Prefiller],
        waiting_tokens: float,
        now_s: float,
    ) -> Need | None:
        if not decoders:
            return None
        capacity = sum(one.capacity_tokens for one in decoders) / len(decoders)
        held = sum(one.held_tokens for one in decoders)
        need = self._flow.need(Pool(capacity, held, waiting_tokens), now_s)
        hosting = {one.id for one in prefillers}
        own = sum(one.id not in hosting for one in decoders)
        if 0 < own < len(decoders):
            need = Need(need.replicas * own / len(decoders), need.signal)
        limits = self._limits.get("decoder")
        if waiting_tokens and limits is not None:
            # Waiting conversations fit on no single decoder, whatever the pool's occupancy.
            least = math.nextafter(limits.up_at * (own or len(decoders)), math.inf)
            if need.replicas < least:
                return Need(least, "no room")
        return need

    def _prefillers_needed(self, prefillers: list[Prefiller], now_s: float) -> Need | None:
        if not prefillers or self._load is None:
            return None
        return self._load.need(sum(one.queued_tokens for one in prefillers), now_s)


# --- by settings ----------------------------------------------------------------------------------


def make_autoscaler(settings: Settings) -> Autoscaler:
    """Build the autoscaler of these settings; raises `ProfileError`."""
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
    """Return the factor by which the prefillers' power cap slows prefills."""
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
