"""Places conversations where all of them together wait least for a prefill."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from conserve.placement.handing_over import Price
from conserve.placement.load import Loads, Work
from conserve.placement.state import (
    NOTHING_SHARED,
    Appended,
    Decoder,
    Placement,
    PlacementPolicy,
    Prefiller,
    Shared,
)

# A home counts as at most this busy.
_BUSIEST = 0.95
# A turn counts as decoding for at least this long.
_LEAST_TURN_S = 0.5


@dataclass(frozen=True, slots=True)
class ElasticPlacement(PlacementPolicy):
    """Chooses the home and the place of the first prefill that add the least total waiting time.

    It is ConServe's own, beyond the paper; README.md has its terms. It takes O(homes x prefillers).

    Args:
        free_share: the share of each home's KV that is kept free of new histories while all its
            conversations decode.
        near: homes are those whose load is above the least by at most this share.
        occupancy_weight: how much more a token costs where all KV is held, beyond reading it.
        host_below: prefillers take new conversations while first prompts ask for less of their
            time.
        most_uneven: no history goes back to an engine whose occupancy is above the emptiest's by
            more.
    """

    hosts_prefillers = True
    keeps_later_turns = True
    moves_appends = True
    pauses = True

    loads: Loads = field(default_factory=Loads)
    free_share: float = 0.1
    near: float = 0.05
    occupancy_weight: float = 1.0
    host_below: float = 0.8
    most_uneven: float = 0.5

    def homes(
        self, decoders: Iterable[Decoder], prefillers: Iterable[Prefiller], now_s: float
    ) -> list[Decoder]:
        """Return the decoders that new conversations may go to, with or without room.

        Prefillers that host are not among them while first prompts ask for most of their time.
        """
        pool = {one.id for one in prefillers}
        hosts = self.loads.demand(len(pool), now_s) < self.host_below
        found = []
        for one in decoders:
            if hosts or one.id not in pool:
                decodes = self.loads.work(one.id, now_s).decodes
                share = self.free_share * min(1.0, decodes / max(1, one.conversations))
                found.append(replace(one, kept_tokens=int(share * one.capacity_tokens)))
        return found

    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        decoders, prefillers = list(decoders), list(prefillers)
        homes = self.homes(decoders, prefillers, now_s)
        pool = [one.id for one in prefillers]
        work = {id: self.loads.work(id, now_s) for id in (*pool, *(one.id for one in homes))}
        loads = home_loads(
            prompt_tokens,
            homes,
            pool,
            shared,
            work,
            demand=self.loads.demand(len(pool), now_s),
            residual_s=self.loads.residual_s(len(pool), now_s),
            occupancy_weight=self.occupancy_weight,
        )
        if not loads:
            return None
        most = (1 + self.near) * min(loads.values())
        emptiest = min(one.occupancy for one in homes)
        may_have_it = (shared.warm_on, shared.left_on)
        even = {one.id for one in homes if one.occupancy <= emptiest + self.most_uneven}
        near = {
            id: load
            for id, load in loads.items()
            if load <= most or (id in may_have_it and id in even)
        }
        room = {
            one.id: max(0, one.free_tokens - work[one.id].lent_tokens)
            for one in decoders
            if one.id in pool
        }
        return cheapest(
            prompt_tokens, near, pool, shared, work, room=room, price=self.loads.price()
        )

    def prefill_later_turn(
        self,
        prefillers: Iterable[Prefiller],
        appended: Appended | None = None,
        now_s: float = 0.0,
    ) -> str | None:
        if appended is None:
            return None
        home = self.loads.work(appended.decoder_id, now_s)
        held_tokens = min(appended.held_tokens, appended.tokens - 1)
        parked_tokens = min(appended.parked_tokens, held_tokens)
        new_tokens = appended.tokens - held_tokens
        home_s = least_s = prefill_cost_s(home, new_tokens, held_tokens)
        back_s = home.costs.handoff_s(new_tokens) + self.loads.price().of(new_tokens)
        best = None
        for one in prefillers:
            if one.id == appended.decoder_id:
                continue
            work = self.loads.work(one.id, now_s)
            there_s = prefill_cost_s(work, appended.tokens - parked_tokens, parked_tokens)
            cost_s = work.costs.handoff_s(parked_tokens) + there_s + back_s
            if cost_s < least_s and cost_s + _doubt_s(home, home_s, work, there_s) < home_s:
                best, least_s = one.id, cost_s
        return best


def home_loads(
    tokens: int,
    homes: Sequence[Decoder],
    pool: Sequence[str],
    shared: Shared,
    work: dict[str, Work],
    *,
    demand: float,
    residual_s: float,
    occupancy_weight: float,
) -> dict[str, float]:
    """Return the seconds that a token takes and delays others by, for each home with room."""
    decoders = [work[one.id] for one in homes if one.id not in pool]
    hosting = [work[one.id] for one in homes if one.id in pool]
    busy = {
        False: sum(one.own_share for one in decoders) / max(1, len(decoders)),
        True: demand + sum(one.append_share for one in hosting) / max(1, len(hosting)),
    }
    waits_s = {
        False: sum(one.residual_s for one in decoders) / max(1, len(decoders)),
        True: residual_s,
    }
    decodes = sum(work[one.id].mean_decodes for one in homes)
    conversations = sum(work[one.id].conversations for one in homes)
    turns_per_s = sum(work[one.id].turns_per_s for one in homes)
    # The share of time in which a conversation decodes (half before any is known), and how long a
    # turn decodes.
    duty = min(1.0, (decodes + 0.5) / (conversations + 1))
    turn_s = max(_LEAST_TURN_S, decodes / turns_per_s if turns_per_s else 0.0)
    loads = {}
    for one in sorted(homes, key=lambda one: one.id in pool):
        new_tokens = shared.beyond(tokens, one.id)
        if not one.has_room(new_tokens):
            continue
        costs = work[one.id].costs
        others = max(duty * work[one.id].conversations, work[one.id].mean_decodes)
        held_tokens = one.held_tokens * min(1.0, others / max(1, one.conversations))
        step_s = costs.decode_s(others + 1, held_tokens + tokens)
        delay_s = others * (step_s - costs.decode_s(others, held_tokens))
        hosts = one.id in pool
        # A second's wait at a turn's beginning counts like a second more of decoding.
        slower = (1 + waits_s[hosts] / turn_s) / (1 - min(_BUSIEST, busy[hosts]))
        fullness = (one.held_tokens + new_tokens) / one.capacity_tokens
        loads[one.id] = (step_s + delay_s) * (1 + occupancy_weight * fullness) * slower
    return loads


def cheapest(
    tokens: int,
    homes: dict[str, float],
    prefillers: Sequence[str],
    shared: Shared,
    work: dict[str, Work],
    *,
    room: Mapping[str, int],
    price: Price,
) -> Placement | None:
    """Choose the cheapest pair of a home and the place where its prompt is prefilled.

    Of equal costs the least loaded home's, and the home itself, also if it is dearer by no more
    than the doubt about either.

    Args:
        homes: their loads, by id.
        room: of prefillers that host, the tokens for which none of their histories is evicted.
    """
    elsewhere = {}
    for one in prefillers:
        past = min(shared.there(one), tokens - 1)
        new_tokens = tokens - past
        pushed_out = new_tokens - room.get(one, new_tokens)
        elsewhere[one] = prefill_cost_s(work[one], new_tokens, past)
        elsewhere[one] += again_s(work[one], pushed_out)
    best: tuple[tuple[float, float], Placement] | None = None
    best_moved: tuple[tuple[float, float], Placement, float] | None = None
    for home, load in homes.items():
        costs = work[home].costs
        there = shared.there(home)
        past = min(shared.found(home), tokens - 1)
        prefill_s = prefill_cost_s(work[home], tokens - past, past)
        here = costs.handoff_s(past - there) + prefill_s, load
        if best is None or here < best[0]:
            best = here, Placement(home, None)
        way_s = costs.handoff_s(tokens - there) + price.of(tokens - there)
        for one in prefillers:
            moved = elsewhere[one] + way_s, load
            if one != home and (best_moved is None or moved < best_moved[0]):
                doubt_s = _doubt_s(work[home], prefill_s, work[one], elsewhere[one])
                best_moved = moved, Placement(home, one), doubt_s
    if best is None or best_moved is None:
        return None if best is None else best[1]
    (moved_s, _), placement, doubt_s = best_moved
    return placement if moved_s + doubt_s < best[0][0] else best[1]


def _doubt_s(home: Work, here_s: float, other: Work, there_s: float) -> float:
    return math.hypot(home.costs.doubt * here_s, other.costs.doubt * there_s)


def prefill_cost_s(work: Work, new_tokens: int, cached_tokens: int) -> float:
    """Return the seconds until a prefill is done, plus those that others there are delayed."""
    costs = work.costs
    own_s = costs.prefill_s(new_tokens, cached_tokens)
    running_s = costs.prefill_share * work.decodes * own_s
    waits_s = work.prefill_wait_s(new_tokens, cached_tokens)
    return waits_s + running_s + work.coming_wait_s(own_s)


def again_s(work: Work, tokens: int) -> float:
    """Return the seconds to compute evicted tokens again, and for which decodes wait."""
    return (1 + work.costs.prefill_share * work.decodes) * work.costs.prefill_s(max(0, tokens))
