"""Decides both roles' numbers of replicas, from what the conversation table observes. Pure.

Observations become needed replicas: first prompts by the profiled curve, and decoders' occupancy or
ConServe's inequality (2). `scale` turns those into wanted replicas. Scaling up is immediate, and
scaling down waits until the need has stayed low, and until some time after the last change.

Of models that share GPUs, one with more engines than its least gives up those that only idle
histories need, once these have been idle for as long as an engine takes to start: the break-even
rule of ski rental (Karlin et al. 1988), which costs at most twice what foresight would.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoscale.capacity.profile import PrefillCurve, Profile, load_profile
from conserve.placement import Decoder, Prefiller
from conserve.settings import RoleSettings, Settings
from conserve.wire import NO_LACK, Lack, Role

# Number of ended conversations whose lifetimes and footprints are averaged.
_REMEMBERED = 200


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that would just suffice at full use, and the signal that says so."""

    replicas: float
    signal: str


class Rate:
    """A rate per second over the last ``window_s``. A window not yet full counts as full."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, value: float, now_s: float) -> None:
        self._seen.append((now_s, value))
        self._sum += value

    def per_s(self, now_s: float) -> float:
        while self._seen and self._seen[0][0] <= now_s - self.window_s:
            self._sum -= self._seen.popleft()[1]
        if not self._seen:
            # Remove the rounding errors of adding and subtracting.
            self._sum = 0.0
        return self._sum / self.window_s


class PrefillLoad:
    """The prefillers' load by the profiled curve (ConServe, sections 3.1 and 4.2).

    Prefilling seconds that arrive per second are the prefillers that would always be busy. The
    queue has to be done within ``window_s`` besides.
    """

    def __init__(self, curve: PrefillCurve, window_s: float, slowdown: float = 1.0) -> None:
        self._curve = curve
        self._slowdown = slowdown
        self._tokens = Rate(window_s)
        self._seconds = Rate(window_s)
        self._window_s = window_s

    def arrived(self, input_tokens: int, now_s: float) -> None:
        self._tokens.add(input_tokens, now_s)
        self._seconds.add(self._slowdown * self._curve.seconds(input_tokens), now_s)

    def need(self, queued_tokens: float, now_s: float) -> Need:
        """Return the prefillers needed.

        Queued tokens count at the rate of the prompts that came, or without any as one prompt.
        """
        tokens_per_s, busy = self._tokens.per_s(now_s), self._seconds.per_s(now_s)
        if tokens_per_s:
            queued_s = queued_tokens * busy / tokens_per_s
        else:
            queued_s = self._slowdown * self._curve.seconds(queued_tokens) if queued_tokens else 0.0
        return Need(busy + queued_s / self._window_s, "input_tokens")


@dataclass(frozen=True, slots=True)
class Pool:
    """All decoders together; ``capacity_tokens`` is the mean of one's KV space."""

    capacity_tokens: float
    held_tokens: float  # KV held or promised for live conversations.
    waiting_tokens: float = 0.0  # Prompts of conversations for which no decoder has room.


class ConversationFlow:
    """The decoders' load by ConServe's inequality (2), ``N B >= R W``.

    Lifetimes and final footprints are means of the conversations that ended last.
    """

    def __init__(self, window_s: float) -> None:
        self._arrivals = Rate(window_s)
        self._lifetimes_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._footprints: deque[float] = deque(maxlen=_REMEMBERED)

    def arrived(self, now_s: float) -> None:
        self._arrivals.add(1, now_s)

    def ended(self, lifetime_s: float, held_tokens: float) -> None:
        self._lifetimes_s.append(lifetime_s)
        self._footprints.append(held_tokens)

    def need(self, pool: Pool, now_s: float) -> Need:
        """Return the decoders needed for what is held, or by inequality (2) if that is more."""
        held = (pool.held_tokens + pool.waiting_tokens) / pool.capacity_tokens
        coming = self._arrivals.per_s(now_s) * self._tokens_seconds() / pool.capacity_tokens
        return Need(held, "occupancy") if held >= coming else Need(coming, "arrivals")

    def _tokens_seconds(self) -> float:
        """Return W times the footprint: R W / B is this times R, over the capacity."""
        ended = len(self._lifetimes_s)
        if not ended:
            return 0.0
        return sum(self._lifetimes_s) / ended * (sum(self._footprints) / ended)


# --- from needed to wanted replicas --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds and thresholds by which a role scales.

    Between `down_at` and `up_at` a constant need changes nothing.
    """

    least: int
    most: int
    target: float = 0.7  # The highest utilisation after a change.
    up_at: float = 0.85  # Above this utilisation there are too few replicas.
    down_at: float = 0.5  # Below it there are too many.
    down_delay_s: float = 60.0  # How long there have to be too many before any is removed.
    cool_down_s: float = 60.0  # How long after a change none is removed.


@dataclass(frozen=True, slots=True)
class Scaling:
    """A decision: when the number last changed, and since when fewer would do."""

    replicas: int
    changed_s: float | None = None
    low_since_s: float | None = None
    why: str = "start"
    given: bool = False  # Whether it gives engines' GPUs to another model.


def scale(limits: Limits, before: Scaling, needed: float | None, now_s: float) -> Scaling:
    """Decide how many replicas to run.

    ``needed`` replicas would just suffice at full use; None changes nothing. As long as it is
    constant, the number changes at most once.
    """
    current = min(max(before.replicas, limits.least), limits.most)
    held = replace(before, replicas=current, low_since_s=None)
    if needed is None or not math.isfinite(needed):
        return replace(held, why="nothing observed")
    wanted = min(max(math.ceil(needed / limits.target), limits.least), limits.most)
    if needed > limits.up_at * current:
        if wanted > current:
            return Scaling(wanted, now_s, None, f"{needed:.2f} needed of {current}")
        return replace(held, why=f"{needed:.2f} needed, and {limits.most} is the most")
    if not (needed < limits.down_at * current and wanted < current):
        return replace(held, why=f"{needed:.2f} needed of {current}")
    low_since_s = now_s if before.low_since_s is None else before.low_since_s
    low_for_s = now_s - low_since_s
    cool = before.changed_s is None or now_s - before.changed_s >= limits.cool_down_s
    if low_for_s >= limits.down_delay_s and cool:
        return Scaling(wanted, now_s, None, f"{needed:.2f} needed of {current}")
    return replace(held, low_since_s=low_since_s, why=f"{needed:.2f} needed of {current}, waiting")


# --- models that share GPUs ----------------------------------------------------------------------

# An engine that Serve has room for has told the table of its start by then.
_STARTS_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Others:
    """The lack of other models that share GPUs, and what this one has in use."""

    lack: Lack
    used_tokens: float  # KV of histories that were used within `Autoscaler.pays_after_s`.
    leaving: Mapping[Role, int]  # This model's engines that are on their way out.


@dataclass(slots=True)
class Wanted:
    """The last decision for a role, and the signal behind it; for `/metrics`."""

    scaling: Scaling
    need: Need | None = None
    in_use: int = 0  # Of models that share GPUs: replicas for what is in use.


class Autoscaler:
    """Decides how many replicas of each role to run; roles without ``limits`` stay as they are.

    Rates are averaged over ``window_s``. To scale prefillers it needs their ``curve``, whose times
    a power cap multiplies by ``prefill_slowdown``. Each engine has ``gpus``.

    Attributes:
        pays_after_s: how long an engine took to start, once one has.
        lacks: what this model has lacked for longer than engines take to tell that they start; None
            until `lack` is called.
    """

    def __init__(
        self,
        limits: dict[Role, Limits],
        start: dict[Role, int],
        curve: PrefillCurve | None,
        window_s: float,
        prefill_slowdown: float = 1.0,
        gpus: float = 1.0,
    ) -> None:
        self.pays_after_s = 60.0
        self.lacks: Lack | None = None
        self._gpus = gpus
        self._lacking_since_s: float | None = None
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
        others: Others | None = None,
    ) -> list[Role]:
        """Update the numbers of replicas, and return the roles whose number has changed.

        Leaving engines count, too, and a prefiller that hosts conversations is in both lists.
        ``waiting_tokens`` are prompts of conversations for which no decoder has room.
        """
        decoders, prefillers = list(decoders), list(prefillers)
        held = sum(one.held_tokens for one in decoders)
        needs: dict[Role, Need | None] = {
            "decoder": self._decoders_needed(decoders, prefillers, held, waiting_tokens, now_s),
            "prefiller": self._prefillers_needed(prefillers, now_s),
        }
        used = needs
        if others is not None:
            used = needs | {
                "decoder": self._decoders_needed(
                    decoders, prefillers, others.used_tokens, waiting_tokens, now_s
                )
            }
        changed: list[Role] = []
        for role, wanted in self.wanted.items():
            wanted.need = need = needs.get(role)
            limits = self._limits.get(role)
            if limits is None:
                continue
            needed, in_use = (None if one is None else one.replicas for one in (need, used[role]))
            if others is not None and needed is not None and in_use is not None:
                wanted.in_use = math.ceil(in_use / limits.target)
                # Idle histories keep engines, but get no more.
                needed = max(in_use, min(needed, limits.up_at * wanted.scaling.replicas))
                if others.lack.owed_gpus:
                    # First the others get what they have in any case.
                    limits = replace(limits, most=max(limits.least, wanted.scaling.replicas))
            after = scale(limits, wanted.scaling, needed, now_s)
            if others is not None and after.replicas == wanted.scaling.replicas:
                after = self._give(role, after, others, now_s)
            if after.replicas != wanted.scaling.replicas:
                changed.append(role)
            wanted.scaling = after
        return changed

    def _give(self, role: Role, before: Scaling, others: Others, now_s: float) -> Scaling:
        """Return the decision to keep fewer engines for what others lack, or the one before."""
        limits = self._limits[role]
        gpus, owed = others.lack
        lacked = math.ceil((owed or gpus) / self._gpus) - others.leaving.get(role, 0)
        enough = max(limits.least, 0 if owed else self.wanted[role].in_use)
        replicas = max(enough, before.replicas - max(0, lacked))
        is_new = before.changed_s is not None and now_s - before.changed_s < self.pays_after_s
        if is_new or replicas >= before.replicas:
            return before
        why = f"{enough} would do of {before.replicas}, and another model lacks GPUs"
        return Scaling(replicas, now_s, None, why, given=True)

    def lack(self, there: Mapping[Role, int], starting: int, now_s: float) -> None:
        """Update `lacks`; ``there`` are engines that stay, ``starting`` those not ready yet."""
        missing = owed = -starting
        for role, wanted in self.wanted.items():
            limits, engines = self._limits.get(role), there.get(role, 0)
            least = wanted.scaling.replicas if limits is None else limits.least
            sought = wanted.scaling.replicas
            if limits is not None:
                sought = min(sought, max(least, wanted.in_use))
            missing += max(0, sought - engines)
            owed += max(0, least - engines)
        if missing <= 0:
            self._lacking_since_s = None
        elif self._lacking_since_s is None:
            self._lacking_since_s = now_s
        self.lacks = NO_LACK
        since_s = self._lacking_since_s
        if since_s is not None and now_s - since_s >= _STARTS_WITHIN_S:
            self.lacks = Lack(missing * self._gpus, max(0, owed) * self._gpus)

    def _decoders_needed(
        self,
        decoders: list[Decoder],
        prefillers: list[Prefiller],
        held: float,
        waiting_tokens: float,
        now_s: float,
    ) -> Need | None:
        if not decoders:
            return None
        capacity = sum(one.capacity_tokens for one in decoders) / len(decoders)
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
    if settings.encoders.replicas:
        # Each of these stays as it is.
        start["encoder"] = settings.encoders.replicas
    roles: list[tuple[Role, RoleSettings]] = [("decoder", settings.decoders)]
    if settings.prefiller_replicas:
        start["prefiller"] = settings.prefillers.replicas
        roles.append(("prefiller", settings.prefillers))
    for role, own in roles:
        if own.max_replicas is not None:
            # An engine that leaves may take `drain_timeout_s`: to be sure first costs little more.
            settled_s = settings.drain_timeout_s / 5
            limits[role] = Limits(
                least=own.replicas,
                most=own.max_replicas,
                down_delay_s=settled_s,
                cool_down_s=settled_s,
            )
    gpus = max(settings.workers_of(own) * own.num_gpus for _, own in roles)
    if not settings.profile:
        return Autoscaler(limits, start, None, chosen.window_s, gpus=gpus)
    profile = load_profile(settings.profile)
    slowdown = _prefill_slowdown(settings, profile)
    return Autoscaler(limits, start, profile.prefill, chosen.window_s, slowdown, gpus)


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
