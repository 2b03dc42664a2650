"""Places conversations where all of them together wait least for a prefill."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from conserve.hints import BACKGROUND
from conserve.placement.load import FirstPrompts, Loads, Work, wait_s
from conserve.placement.policy import PlacementPolicy
from conserve.placement.state import NOTHING_SHARED, Coming, Decoder, Placement, Prefiller, Shared

# A home counts as at most this busy.
_BUSIEST = 0.95
# A conversation counts as decoding for at least this long.
_LEAST_DECODING_S = 0.5
# Rates of about the last minute tell nothing beyond the next one. Without this bound a conversation
# would live for ever where none has come of late, and a home would count for more than any prefill.
_MOST_LIFE_S = 60.0
# To compute what another engine has, or computes, takes time that the next prompts might use: it
# costs this much more.
_AGAIN = 0.5
# How fast answers will be is not known well: for a smaller gain, a prompt does not leave the engine
# that has most of what it shares with others.
_GAIN = 0.1
# Digits after the point of the seconds that are compared: below a microsecond, costs are equal, and
# no choice turns on how a sum was rounded.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ElasticPlacement(PlacementPolicy):
    """Chooses the home and the place of the first prefill that add the least total waiting time.

    It is ConServe's own, beyond the paper; README.md has its terms. It takes O(homes + prefillers).

    Args:
        free_share: the share of each home's KV that is kept free of new histories while all its
            conversations decode.
        occupancy_weight: how much more a token costs where all KV is held, beyond reading it.
        host_below: prefillers take new conversations while first prompts ask for less of their
            time, beyond what they ask of decoders.
        most_uneven: no history goes to an engine whose occupancy is above the emptiest's by more.
    """

    hosts_prefillers = True
    keeps_later_turns = True
    moves_turns = True
    pauses = True

    loads: Loads = field(default_factory=Loads)
    free_share: float = 0.1
    occupancy_weight: float = 1.0
    host_below: float = 0.8
    most_uneven: float = 0.5

    def homes(
        self, decoders: Iterable[Decoder], prefillers: Iterable[Prefiller], now_s: float
    ) -> list[Decoder]:
        """Return the decoders that new conversations may go to, with or without room.

        Prefillers that host are not among them while first prompts ask for most of their time.
        """
        decoders, pool = list(decoders), [one.id for one in prefillers]
        shares = self.first_prompts_shares(decoders, pool, now_s)
        hosts = shares[True] - shares[False] < self.host_below
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
        ids = (*pool, *(one.id for one in homes))
        work = {id: self.loads.work(id, now_s, shared.adapter) for id in ids}
        costs = home_costs(
            prompt_tokens,
            homes,
            pool,
            shared,
            work,
            first=self.loads.first_prompts(now_s),
            shares=self.first_prompts_shares(decoders, pool, now_s),
            occupancy_weight=self.occupancy_weight,
        )
        if not costs:
            return None
        most = min(one.occupancy for one in homes if one.id in costs) + self.most_uneven
        even = {one.id: costs[one.id] for one in homes if one.id in costs and one.occupancy <= most}
        room = {
            one.id: max(0, one.free_tokens - work[one.id].lent_tokens)
            for one in decoders
            if one.id in pool
        }
        shared = self._with_times(shared, now_s)
        return cheapest(prompt_tokens, even, pool, shared, work, room=room)

    def turn_costs(
        self, prompt_tokens: int, decoders: Iterable[Decoder], shared: Shared, now_s: float
    ) -> dict[str, tuple[float, Coming | None]]:
        shared = self._with_times(shared, now_s)
        room = {one.id: one.free_tokens for one in decoders}
        work = {id: self.loads.work(id, now_s, shared.adapter) for id in room}
        turns_per_s = sum(one.turns_per_s for one in work.values())
        decodes = sum(one.mean_decodes for one in work.values())
        # How long a turn decodes, by Little's law.
        decoding_s = min(decodes / turns_per_s, _MOST_LIFE_S) if turns_per_s else 0.0
        decoding_s = max(_LEAST_DECODING_S, decoding_s)
        most = min(max(shared.tokens.values(), default=0), prompt_tokens - 1)
        found = {}
        for id, one in work.items():
            cost_s, after = ready_s(prompt_tokens, id, shared, one)
            # What has no room beside it is loaded again, too.
            own = BACKGROUND if shared.background else 1.0
            cost_s += own * one.costs.handoff_s(max(0, prompt_tokens - shared.there(id) - room[id]))
            # As if the others' prompts were as long.
            n = 1 + max(one.decodes + one.coming, one.mean_decodes)
            alone_s = one.costs.decode_s(1, prompt_tokens)
            slower = one.costs.decode_s(n, n * prompt_tokens) / alone_s if alone_s else 1.0
            cost_s += own * slower * decoding_s
            if min(shared.there(id), prompt_tokens - 1) < most:
                cost_s *= 1 + _GAIN
            found[id] = round(cost_s, _DIGITS), after
        return found

    def _with_times(self, shared: Shared, now_s: float) -> Shared:
        if (coming := shared.coming) is None:
            return shared
        done_in_s = self.loads.done_in_s(coming.engine_id, coming.history_id, now_s)
        return replace(shared, coming=replace(coming, done_in_s=done_in_s))

    def first_prompts_shares(
        self, decoders: Sequence[Decoder], pool: Collection[str], now_s: float
    ) -> dict[bool, float]:
        """Return the share of a decoder's (False) and a prefiller's time that they will take."""
        return _shares(
            self.loads.first_prompts(now_s),
            [self.loads.work(one.id, now_s) for one in decoders if one.id not in pool],
            [self.loads.work(id, now_s) for id in pool],
        )


def _shares(
    first: FirstPrompts, decoders: Sequence[Work], prefillers: Sequence[Work]
) -> dict[bool, float]:
    """Return the share of a decoder's (False) and a prefiller's time that first prompts will take.

    It is all the prefillers' if handing over costs less than holding up the conversations of all
    engines, if these lived on the decoders; else every engine's alike. Where prompts ran lately
    would tell less: decoders whose prompts were handed over look idle, so conversations go there
    and the next prompts are handed over, too; and the other way round.
    """
    everyone = (*decoders, *prefillers)
    if decoders and prefillers:
        n = len(decoders)
        decodes = sum(one.mean_decodes for one in everyone) / n
        conversations = sum(one.conversations for one in everyone)
        turns_per_s = sum(one.turns_per_s for one in everyone) / max(1, conversations)
        held_up_s = conversations / n * wait_s(first.seconds, turns_per_s)
        held_up_s += sum(one.costs.prefill_share for one in decoders) * decodes * first.seconds / n
        way_s = sum(one.costs.handoff_s(first.tokens) for one in decoders) / n
        if held_up_s > way_s:
            return {False: 0.0, True: first.engines / len(prefillers)}
    alike = first.engines / max(1, len(everyone))
    return {False: alike, True: alike}


def home_costs(
    tokens: int,
    homes: Sequence[Decoder],
    pool: Collection[str],
    shared: Shared,
    work: Mapping[str, Work],
    *,
    first: FirstPrompts,
    shares: Mapping[bool, float],
    occupancy_weight: float,
) -> dict[str, float]:
    """Return the seconds for which a conversation decodes and waits at each home with room.

    The delays of others' decodes are included, its first prefill is not. Decoders are taken to be
    alike, and so are prefillers that host.
    """
    decodes = sum(work[one.id].mean_decodes for one in homes)
    conversations = sum(work[one.id].conversations for one in homes)
    turns_per_s = sum(work[one.id].turns_per_s for one in homes) / max(1, conversations)
    # The share of time in which a conversation decodes (half before any is known).
    duty = min(1.0, (decodes + 0.5) / (conversations + 1))
    # How long it lives, by Little's law, and for how long of that it decodes. That law does not
    # hold while conversations come faster than for the last minute: then nearly all are young, and
    # one is taken to live for twice their mean age.
    life_s = conversations / first.per_s if first.per_s else math.inf
    ages_s = sum(work[one.id].ages_s for one in homes)
    life_s = min(life_s, 2 * ages_s / conversations, _MOST_LIFE_S) if conversations else 0.0
    decoding_s = max(_LEAST_DECODING_S, min(1.0, decodes / max(1, conversations)) * life_s)
    busy, waits_s = {}, {}
    for hosts in (False, True):
        alike = [work[one.id] for one in homes if (one.id in pool) == hosts]
        appends = sum(one.append_share for one in alike) / max(1, len(alike))
        append_s = sum(one.append_share * one.append_s for one in alike) / max(1, len(alike))
        append_s = append_s / appends if appends else 0.0
        busy[hosts] = min(_BUSIEST, shares[hosts] + appends)
        waits_s[hosts] = life_s * (
            _waiting(shares[hosts], first.seconds, turns_per_s)
            + _waiting(appends, append_s, turns_per_s)
        )
    token_s = {}
    for one in sorted(homes, key=lambda one: one.id in pool):
        new_tokens = shared.beyond(tokens, one.id)
        if not one.has_room(new_tokens):
            continue
        costs = work[one.id].costs
        others = max(duty * work[one.id].conversations, work[one.id].mean_decodes)
        held_tokens = one.held_tokens * min(1.0, others / max(1, one.conversations))
        step_s = costs.decode_s(others + 1, held_tokens + tokens)
        delay_s = work[one.id].weight * others * (step_s - costs.decode_s(others, held_tokens))
        fullness = (one.held_tokens + new_tokens) / one.capacity_tokens
        token_s[one.id] = (step_s + delay_s) * (1 + occupancy_weight * fullness)
    # Costs may leave decodes out.
    least_s = min(token_s.values(), default=0.0) or 1.0
    return {
        id: decoding_s * each_s / least_s / (1 - busy[id in pool]) + waits_s[id in pool]
        for id, each_s in token_s.items()
    }


def _waiting(share: float, prefill_s: float, turns_per_s: float) -> float:
    """Return the share of its life that a conversation waits for such prefills of others."""
    if not share or not prefill_s:
        return 0.0
    # A prefill that runs may be followed by others.
    return share / prefill_s * wait_s(prefill_s, turns_per_s) / (1 - min(_BUSIEST, share))


def cheapest(
    tokens: int,
    homes: dict[str, float],
    prefillers: Sequence[str],
    shared: Shared,
    work: dict[str, Work],
    *,
    room: Mapping[str, int],
) -> Placement | None:
    """Choose the cheapest pair of a home and the place where its prompt is prefilled.

    Of equal costs the cheapest home's, and the home itself, also if it is dearer by no more than
    the doubt about either.

    Args:
        homes: what they cost after the prefill, by id.
        room: of prefillers that host, the tokens for which none of their histories is evicted.
    """
    elsewhere = {}
    for one in prefillers:
        past = min(shared.there(one), tokens - 1)
        new_tokens = tokens - past
        pushed_out = new_tokens - room.get(one, new_tokens)
        elsewhere[one] = prefill_cost_s(work[one], new_tokens, past, shared)
        elsewhere[one] += _AGAIN * work[one].costs.prefill_s(max(0, shared.most - past), past)
        elsewhere[one] = round(elsewhere[one] + again_s(work[one], pushed_out), _DIGITS)
    two_least = sorted(elsewhere, key=elsewhere.__getitem__)[:2]
    best: tuple[tuple[float, float], Placement] | None = None
    best_moved: tuple[tuple[float, float], Placement, float] | None = None
    for home, exact_s in homes.items():
        costs, later_s = work[home].costs, round(exact_s, _DIGITS)
        there = shared.there(home)
        here_s, after = ready_s(tokens, home, shared, work[home])
        here = round(here_s + later_s, _DIGITS), later_s
        if best is None or here < best[0]:
            best = here, Placement(home, None, after)
        way_s = costs.handoff_s(tokens - there)
        for one in (id for id in two_least if id != home):
            comes_s = elsewhere[one] + way_s + work[home].adapter_s
            moved = round(comes_s + held_up_s(work[home], comes_s) + later_s, _DIGITS), later_s
            if best_moved is None or moved < best_moved[0]:
                doubt_s = math.hypot(
                    work[home].costs.doubt * here_s, work[one].costs.doubt * elsewhere[one]
                )
                best_moved = moved, Placement(home, one), doubt_s
    if best is None or best_moved is None:
        return None if best is None else best[1]
    (moved_s, _), placement, doubt_s = best_moved
    return placement if round(moved_s + doubt_s, _DIGITS) < best[0][0] else best[1]


def ready_s(tokens: int, home: str, shared: Shared, work: Work) -> tuple[float, Coming | None]:
    """Return the seconds until a home has prefilled a prompt, plus those that others are delayed.

    It may wait for what is coming to host memory, and load it, if that ends sooner.
    """
    costs, there = work.costs, shared.there(home)
    own = BACKGROUND if shared.background else 1.0

    def with_past(past: int) -> float:
        past = min(past, tokens - 1)
        again_s = _AGAIN * costs.prefill_s(max(0, shared.most - past), past)
        loaded_s = own * costs.handoff_s(past - there)
        return loaded_s + prefill_cost_s(work, tokens - past, past, shared) + again_s

    now_s, coming = with_past(shared.found(home)), shared.coming
    if coming is None or coming.tokens <= shared.found(home):
        return now_s, None
    waits_s = own * max(0.0, coming.done_in_s - work.backlog_s) + with_past(coming.tokens)
    return (waits_s, coming) if waits_s < now_s else (now_s, None)


def prefill_cost_s(work: Work, new_tokens: int, cached_tokens: int, shared: Shared) -> float:
    """Return the seconds until a prefill is done, plus those that others there are delayed.

    A background turn's seconds count less, its own and those of others.
    """
    costs = work.costs
    # Each embedding is a token of the prompt, and needs none where its KV is found.
    encode_tokens = min(shared.encode_tokens, new_tokens)
    own_s, encode_s = costs.prefill_s(new_tokens, cached_tokens), costs.encode_s(encode_tokens)
    running_s = work.decodes * (costs.prefill_share * own_s + encode_s)
    waits_s = work.adapter_s + work.prefill_wait_s(new_tokens, cached_tokens, encode_tokens)
    delays_s = running_s + work.coming_wait_s(own_s + encode_s)
    return (BACKGROUND if shared.background else 1.0) * waits_s + work.weight * delays_s


def held_up_s(work: Work, after_s: float) -> float:
    """Return for how long prefills hold up a conversation that comes to an engine after a time."""
    return work.costs.prefill_share * max(0.0, work.backlog_s - after_s)


def again_s(work: Work, tokens: int) -> float:
    """Return the seconds to compute evicted tokens again, and for which decodes wait."""
    return (1 + work.costs.prefill_share * work.decodes) * work.costs.prefill_s(max(0, tokens))
