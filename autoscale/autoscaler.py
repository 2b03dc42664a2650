"""Both roles' numbers of replicas, from what the conversation table observes."""

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
    """Tells what was decided last for one role, and the signal that decided; for `/metrics`."""

    scaling: Scaling
    need: Need | None = None


class Autoscaler:
    """Told what happens, it says how many replicas there are to be.

    Args:
        limits: settings of the roles that are scaled; other roles stay as they are.
        start: replicas at the start, by role.
        curve: the prefillers' profiled curve; needed where they are scaled.
        window_s: the time over which rates are averaged.
        prefill_slowdown: factor by which prefills take longer than the curve says, under a power
            cap.

    Raises:
        ValueError: prefillers are to be scaled without a curve.
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
        """A first turn went to a prefiller."""
        if self._load is not None:
            self._load.arrived(input_tokens, now_s)

    def conversation_bound(self, now_s: float) -> None:
        """A new conversation was bound to a decoder."""
        self._flow.arrived(now_s)

    def conversation_ended(self, lifetime_s: float, held_tokens: int) -> None:
        """A conversation ended, which held so many tokens of KV at last."""
        self._flow.ended(lifetime_s, held_tokens)

    def adopt(self, role: Role, replicas: int, now_s: float) -> None:
        """Go on from what a predecessor wanted, as if that had been decided now."""
        limits, before = self._limits.get(role), self.wanted[role].scaling
        if limits is not None and before.replicas < replicas <= limits.most:
            self.wanted[role].scaling = Scaling(replicas, now_s, None, "as before")

    def replicas(self, role: Role) -> int:
        """How many there are to be."""
        return self.wanted[role].scaling.replicas

    def decide(
        self,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        waiting_tokens: float,
        now_s: float,
    ) -> list[Role]:
        """Look again.

        Args:
            decoders, prefillers: those alive, also where they are leaving: what they have counts.
                A prefiller that hosts conversations is among both, and has its part of the need.
            waiting_tokens: prompts of the conversations for which no decoder had room.

        Returns:
            The roles whose number has changed.
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
            # Free room adds up, but a conversation fits on one decoder or not: whatever the
            # pool's occupancy, those that there are do not suffice.
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
            # An engine that leaves may take `drain_timeout_s`: to be sure first costs little more.
            settled_s = chosen.drain_timeout_s / 5
            limits[role] = Limits(
                own.replicas,
                own.max_replicas,
                down_delay_s=settled_s,
                cool_down_s=settled_s,
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
