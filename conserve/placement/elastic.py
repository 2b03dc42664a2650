"""Where all conversations together wait least for a prefill."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from conserve.placement.handing_over import Price
from conserve.placement.load import Loads, Work
from conserve.placement.state import NOTHING_SHARED, Appended, Decoder, Placement, Prefiller, Shared

# A home whose time seems to be all taken counts as so much busy, and no more.
_BUSIEST = 0.95


@dataclass(frozen=True, slots=True)
class ElasticPlacement:
    """Home and place of the first prefill together, where all conversations wait least for it.

    An engine's role is what it mostly does: decoders prefill prompts of their own where that is
    sooner over for everybody, and a prefiller that is also listed as a decoder *hosts*
    conversations while first prompts leave it time.

    *Homes*: those with room whose load is near the least. The load is what makes a token slow
    there: ``(1 + 4 occupancy) / (1 - share)``, the prompt included, where the share of time that
    prefills take is a decoder's own (the mean of all decoders': one engine's is noise), and for a
    prefiller what first prompts ask of each prefiller and what its own conversations append. A
    prefiller's counts up to twice, the emptier the emptiest decoder is; where there are fewer than
    two decoders a prefiller, which hosting would relieve of much, as much less of that. The engines
    that hold the prompt's beginning, or should have what a paused history has left there, are homes
    too, unless they are much fuller than the emptiest.

    *Prefill*: at the home or at any prefiller, by the least sum, in seconds, of

    - the prompt's own time until it is done: what waits there before it, itself, the iterations
      that it shares with running decodes (its chunks take one each), and the way of the KV: to the
      home, with what prompts that were handed over took beyond their estimates (`HandingOver`),
      or from host memory,
    - the delay of others: of each decode that runs there, by as much as prefills hold up its
      iterations; and of the turns that come while it runs, at the rate at which they came of late,
      but of each conversation that is there one at most,
    - where a prompt is handed over by a prefiller that hosts: what its copy there pushes out for
      want of room, beside what was lent in the last ten seconds. That is computed again.

    What the engine has already is not computed (`Shared`), so a history that comes back goes where
    it costs least to have it again.

    *Later turns* are prefilled at home, unless it is known that they append so much that a
    prefiller costs less, by the same sum: it takes from host memory what that has of the history,
    computes the rest and what is appended, and the home takes over the latter. Where host memory
    has nothing of a history, that is seldom so.

    Of each home's KV a tenth is promised to nobody while all its conversations decode, and less as
    some of them are idle: running turns grow into it, and would push out the histories of those.

    It predicts nothing: neither how long answers get, nor how many turns come. The policy reads the
    engines' state by `Loads`, in O(homes x prefillers). It is ConServe's own, beyond the paper;
    what it is worth, and where it is not, is in docs/simulation.md.

    Settings:
        loads: what is known of engines' work.
        free_share: of each home's KV, what nothing new is promised where everybody decodes.
        near: homes are those whose load is above the least by this share at most.
        occupancy_weight: how much slower a token is where all KV is held: it is read for each.
        host_below: prefillers take new conversations while first prompts ask for less than this
            share of their time.
        most_uneven: nobody goes back to where more of the capacity is held, by this, than on the
            emptiest home.

    Example:
        >>> from conserve.placement.load import EngineLoad
        >>> policy = ElasticPlacement()
        >>> homes = [Decoder("d1", 8000, 1000, 1)]
        >>> policy.place(900, homes, [Prefiller("p1")])
        Placement(decoder_id='d1', prefiller_id=None)
        >>> policy.loads.says("d1", EngineLoad(decodes=30, step_s=0.02), now_s=1.0)
        >>> policy.place(900, homes, [Prefiller("p1")], now_s=1.0)
        Placement(decoder_id='d1', prefiller_id='p1')
    """

    loads: Loads = field(default_factory=Loads)
    free_share: float = 0.1
    near: float = 0.05
    occupancy_weight: float = 4.0
    host_below: float = 0.8
    most_uneven: float = 0.5

    def homes(
        self, decoders: Iterable[Decoder], prefillers: Sequence[Prefiller], now_s: float
    ) -> list[Decoder]:
        """Decoders that new conversations may go to, with or without room, as they may be filled.

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
        turn1_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        decoders, prefillers = list(decoders), list(prefillers)
        homes = self.homes(decoders, prefillers, now_s)
        pool = [one.id for one in prefillers]
        work = {id: self.loads.work(id, now_s) for id in (*pool, *(one.id for one in homes))}
        demand = self.loads.demand(len(pool), now_s)
        loads = home_loads(turn1_tokens, homes, pool, shared, work, demand, self.occupancy_weight)
        if not loads:
            return None
        most = (1 + self.near) * min(loads.values())
        emptiest = min(one.occupancy for one in homes)
        may_have_it = (shared.warm_on, shared.left_on)
        near = {
            one.id: loads[one.id]
            for one in homes
            if one.id in loads
            and (
                loads[one.id] <= most
                or (one.id in may_have_it and one.occupancy <= emptiest + self.most_uneven)
            )
        }
        room = {
            one.id: max(0, one.free_tokens - work[one.id].lent_tokens)
            for one in decoders
            if one.id in pool
        }
        return cheapest(turn1_tokens, near, pool, shared, work, room, self.loads.price(now_s))

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
        least_s = prefill_cost_s(home, new_tokens, held_tokens)
        back_s = home.costs.handoff_s(new_tokens) + self.loads.price(now_s).of(new_tokens)
        best = None
        for one in prefillers:
            if one.id == appended.decoder_id:
                continue
            work = self.loads.work(one.id, now_s)
            there_s = prefill_cost_s(work, appended.tokens - parked_tokens, parked_tokens)
            cost_s = work.costs.handoff_s(parked_tokens) + there_s + back_s
            if cost_s < least_s:
                best, least_s = one.id, cost_s
        return best


def home_loads(
    tokens: int,
    homes: Sequence[Decoder],
    pool: Sequence[str],
    shared: Shared,
    work: dict[str, Work],
    demand: float,
    occupancy_weight: float,
) -> dict[str, float]:
    """How slow a token is, with a prompt on it, at each home that has room for that.

    Args:
        pool: the prefillers' ids.
        demand: the share of a prefiller's time that first prompts ask for.
    """
    decoders = [one for one in homes if one.id not in pool]
    share = sum(work[one.id].own_share for one in decoders) / max(1, len(decoders))
    spared = 1 - min((one.occupancy for one in decoders), default=1.0)
    premium = max(0.0, spared) * min(1.0, len(decoders) / max(1, 2 * len(pool)))
    loads = {}
    for one in homes:
        new_tokens = shared.beyond(tokens, one.id)
        if not one.has_room(new_tokens):
            continue
        held = (one.held_tokens + new_tokens) / one.capacity_tokens
        hosts = one.id in pool
        busy = min(_BUSIEST, demand + work[one.id].append_share if hosts else share)
        load = (1 + occupancy_weight * held) / (1 - busy)
        loads[one.id] = load * (1 + premium) if hosts else load
    return loads


def cheapest(
    tokens: int,
    homes: dict[str, float],
    prefillers: Sequence[str],
    shared: Shared,
    work: dict[str, Work],
    room: Mapping[str, int],
    price: Price,
) -> Placement | None:
    """Of all pairs of a home and where it has its prompt prefilled, the one of the least cost.

    Of equal costs the least loaded home's, and the home itself.

    Args:
        homes: their loads, by id.
        room: of prefillers that have histories of their own, the tokens for which nothing of those
            has to go.
        price: of handing over, beyond what work and ways are estimated to take.
    """
    elsewhere = {}
    for one in prefillers:
        past = min(shared.there(one), tokens - 1)
        new_tokens = tokens - past
        pushed_out = new_tokens - room.get(one, new_tokens)
        elsewhere[one] = prefill_cost_s(work[one], new_tokens, past)
        elsewhere[one] += again_s(work[one], pushed_out)
    best: tuple[tuple[float, float], Placement] | None = None
    for home, load in homes.items():
        costs = work[home].costs
        there = shared.there(home)
        past = min(shared.found(home), tokens - 1)
        here_s = costs.handoff_s(past - there) + prefill_cost_s(work[home], tokens - past, past)
        moved_s = costs.handoff_s(tokens - there) + price.of(tokens - there)
        places: list[tuple[float, str | None]] = [(here_s, None)]
        places += [(elsewhere[one] + moved_s, one) for one in prefillers if one != home]
        for cost_s, prefiller in places:
            if best is None or (cost_s, load) < best[0]:
                best = (cost_s, load), Placement(home, prefiller)
    return None if best is None else best[1]


def prefill_cost_s(work: Work, new_tokens: int, cached_tokens: int) -> float:
    """Until a prefill is done at an engine, and what others there are delayed by it, in seconds."""
    costs = work.costs
    own_s = costs.prefill_s(new_tokens, cached_tokens)
    running_s = costs.prefill_share * work.decodes * own_s
    waits_s = work.prefill_wait_s(new_tokens, cached_tokens)
    return waits_s + running_s + work.coming_wait_s(own_s)


def again_s(work: Work, tokens: int) -> float:
    """Until so much that was pushed out is there again, and what decodes wait meanwhile."""
    return (1 + work.costs.prefill_share * work.decodes) * work.costs.prefill_s(max(0, tokens))
