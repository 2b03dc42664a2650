"""Keeps the ledger of who has leased which SMs of a GPU: engines, and the halves of engines.

AgentServe (§III-C) binds decoding to the smallest of ten slots that has at least the SMs it needs;
prefill gets the complement. A lease says which units of the GPU's split its SMs are
(`hetero.sm_units`), so that engines in different processes take different ones. Making the
contexts, and binding threads to them, is the engine's work.

Pure: no clock, no driver, one thread at a time.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from hetero.sm_units import SM_SLOTS, SmSlots


class NoFreeSms(Exception):
    """Fewer SMs are free on that GPU, in one piece, than were asked for; nothing has changed."""


class UnknownSmLease(KeyError):
    """There is no such lease (any more): its owner may have been taken for dead."""


class SmLease(NamedTuple):
    """SMs of one GPU that one owner has for itself.

    Attributes:
        gpu: the GPU's UUID, or a MIG device's.
        units: the numbers of its units, one after the other; none for a prefill side that decoding
            has squeezed out.
        slots: the largest of the ten slots that fits into them, 0 to 10.
        sms: how many SMs those units are.
    """

    id: int
    gpu: str
    owner: str
    units: range
    slots: int
    sms: int


class SmSlotLedger:
    """Knows who has leased which SMs of which GPU. No unit is leased twice.

    A lease gets units next to each other: as few as make the smallest slot with at least the SMs
    asked for. They are taken beside the owner's others if there is room, so that the border between
    the two can move (`split`); else from the smallest free run that has enough, so that large ones
    stay. Where no run has room for the slot, but one for what was asked, the largest is given
    whole: so ten tenths are all SMs, whatever the rounding.

    Live leases are never moved by others: what is free may lie in pieces, none of them enough for
    what all of them would be. Engines that lease when they start and leave when they end, as ours
    do, meet that only where their shares differ.

    Args:
        gpus: the slots of each GPU or MIG device, by UUID.
        first_id: of the leases' ids; higher than any that an earlier ledger gave, so that none of
            those passes for another's.
    """

    def __init__(self, gpus: Mapping[str, SmSlots], first_id: int = 1) -> None:
        self._gpus = dict(gpus)
        # Those with units, by where they begin, which no two share.
        self._placed: dict[str, list[tuple[int, SmLease]]] = {uuid: [] for uuid in self._gpus}
        self._leases: dict[int, SmLease] = {}
        self._owned: defaultdict[str, set[int]] = defaultdict(set)
        self._next_id = first_id

    def lease(self, gpu: str, owner: str, asked_sms: int) -> SmLease:
        """Lease at least so many SMs of a GPU.

        Raises:
            NoFreeSms: they are not free in one piece.
            KeyError: there is no such GPU here.
            ValueError: the GPU has fewer.
        """
        units = self._fit(gpu, owner, asked_sms)
        lease = self._made(self._next_id, gpu, owner, units)
        self._next_id += 1
        self._put(lease)
        return lease

    def lease_slots(self, gpu: str, owner: str, slots: int) -> SmLease:
        """Lease so many tenths of a GPU, from one tenth's border to another's.

        So whatever adds up to ten has room beside each other, in any order, and all SMs are used;
        `lease`, which rounds up, cannot promise that. How many SMs a tenth is depends on where it
        lies, by one unit. Of free runs that have room the smallest is taken.

        Raises:
            NoFreeSms: they are not free in one piece.
            KeyError: there is no such GPU here.
            ValueError: there are no so many slots.
        """
        if not 1 <= slots <= SM_SLOTS:
            raise ValueError(f"asked for {slots} of {SM_SLOTS} slots")
        borders, runs = self._gpus[gpu].borders, self.free(gpu)
        places = [
            (len(run), units.start, units)
            for units in map(range, borders, borders[slots:])
            for run in runs
            if units and run.start <= units.start and units.stop <= run.stop
        ]
        if not places:
            holders = ", ".join(
                f"{one.owner} has {_shown(one.units)}" for _, one in self._placed[gpu]
            )
            raise NoFreeSms(
                f"{gpu}: {slots} of {SM_SLOTS} slots are not free in one piece"
                + (f": {holders} of {self._gpus[gpu].split.units} units" if holders else "")
            )
        lease = self._made(self._next_id, gpu, owner, min(places)[2])
        self._next_id += 1
        self._put(lease)
        return lease

    def restore(self, lease: SmLease) -> None:
        """Take in a lease that an earlier ledger gave, since its owner has its contexts still.

        Raises:
            NoFreeSms: somebody has been given units of it since: the owner has to lease anew.
            KeyError: there is no such GPU here.
            ValueError: the GPU has not these units, or the id is another's.
        """
        split = self._gpus[lease.gpu].split
        if not 0 <= lease.units.start <= lease.units.stop <= split.units:
            raise ValueError(f"{lease.gpu} has {split.units} units, and not {_shown(lease.units)}")
        known = self._leases.get(lease.id)
        if known == lease:
            return
        if known is not None:
            raise ValueError(f"lease {lease.id} is another one")
        for _, other in self._placed[lease.gpu]:
            if _meet(other.units, lease.units):
                raise NoFreeSms(
                    f"{lease.gpu}: units {_shown(lease.units)} are not free, since {other.owner} "
                    f"has {_shown(other.units)}"
                )
        self._next_id = max(self._next_id, lease.id + 1)
        self._put(self._made(lease.id, lease.gpu, lease.owner, lease.units))

    def rebind(self, lease_id: int, asked_sms: int) -> SmLease:
        """Change a lease to the smallest slot with at least so many SMs; it keeps its id.

        It keeps its units, or grows from them, where there is room.

        Raises:
            NoFreeSms: they are not free in one piece; the lease stays as it was.
            UnknownSmLease: it is gone.
        """
        old = self.get(lease_id)
        units = self._fit(old.gpu, old.owner, asked_sms, old)
        lease = self._made(old.id, old.gpu, old.owner, units)
        self._displace(old)
        self._place(lease)
        return lease

    def split(self, decode_id: int, prefill_id: int, asked_sms: int) -> tuple[SmLease, SmLease]:
        """Move the border between two neighbouring leases of one GPU (AgentServe's rebinding).

        Decoding gets the smallest slot with at least so many SMs of what the two have together,
        prefill the rest of it, which may be none. Decoding keeps its end.

        Raises:
            NoFreeSms: they have not so many together; both stay as they were.
            UnknownSmLease: one is gone.
            ValueError: they are not two leases of one GPU, or something lies between them.
        """
        decode, prefill = self.get(decode_id), self.get(prefill_id)
        if decode.gpu != prefill.gpu or decode_id == prefill_id:
            raise ValueError("a border is between two leases of one GPU")
        both = _joined(decode.units, prefill.units)
        gpu = self._gpus[decode.gpu]
        wanted, have = gpu.smallest(asked_sms), gpu.split.sms_of(both)
        if have < asked_sms:
            raise NoFreeSms(f"{decode.gpu}: asked for {asked_sms} SMs, {have} are the two's")
        if decode.units.start <= prefill.units.start or not prefill.units:
            mine = gpu.split.lowest(both, gpu.sizes[wanted])
            rest = range(mine.stop, both.stop)
        else:
            mine = gpu.split.highest(both, gpu.sizes[wanted])
            rest = range(both.start, mine.start)
        self._displace(decode)
        self._displace(prefill)
        decode = self._made(decode.id, decode.gpu, decode.owner, mine)
        prefill = self._made(prefill.id, prefill.gpu, prefill.owner, rest)
        self._place(decode)
        self._place(prefill)
        return decode, prefill

    def release(self, lease_id: int) -> SmLease:
        """End a lease.

        Raises:
            UnknownSmLease: it is gone.
        """
        lease = self.get(lease_id)
        self._take(lease)
        return lease

    def release_owner(self, owner: str) -> list[SmLease]:
        """End all of an owner's leases: it left, or died."""
        ended = [self._leases[lease_id] for lease_id in sorted(self._owned.get(owner, ()))]
        for lease in ended:
            self._take(lease)
        return ended

    def keep_owners(self, alive: Iterable[str]) -> list[SmLease]:
        """End the leases of all owners but these."""
        return [
            lease for owner in set(self._owned) - set(alive) for lease in self.release_owner(owner)
        ]

    def get(self, lease_id: int) -> SmLease:
        """A lease by its id.

        Raises:
            UnknownSmLease: it is gone.
        """
        try:
            return self._leases[lease_id]
        except KeyError:
            raise UnknownSmLease(
                f"no lease {lease_id}: it was released, or its owner lost"
            ) from None

    def leases(self) -> list[SmLease]:
        """All leases, the oldest first."""
        return sorted(self._leases.values(), key=lambda lease: lease.id)

    def free(self, gpu: str) -> list[range]:
        """Units of a GPU that nobody has, in runs, from the lowest on."""
        return [run for _, run in self._runs(gpu)]

    def free_sms(self, gpu: str) -> int:
        """SMs of a GPU that nobody has, in however many pieces."""
        return sum(sms for sms, _ in self._runs(gpu))

    def _runs(self, gpu: str, without: SmLease | None = None) -> list[tuple[int, range]]:
        """Return what is free, and how many SMs that is; of one lease, as if it had ended."""
        before = self._gpus[gpu].split.before
        runs, start = [], 0
        for taken, lease in self._placed[gpu]:
            if lease is without:
                continue
            if taken > start:
                runs.append((before[taken] - before[start], range(start, taken)))
            start = lease.units.stop
        units = len(before) - 1
        if start < units:
            runs.append((before[units] - before[start], range(start, units)))
        return runs

    def _fit(self, gpu: str, owner: str, asked_sms: int, old: SmLease | None = None) -> range:
        """Units for so many SMs that nobody has, or the old lease that is to be changed."""
        slots = self._gpus[gpu]
        split, size = slots.split, slots.sizes[slots.smallest(asked_sms)]
        runs = self._runs(gpu, old)
        enough = [run for sms, run in runs if sms >= size]
        around_sms, around = 0, range(0)
        if old is not None and old.units:
            around_sms, around = next(one for one in runs if old.units.start in one[1])
        if not enough:
            largest_sms, largest = max(runs, default=(0, range(0)), key=itemgetter(0))
            if around_sms >= asked_sms:
                return around
            if largest_sms >= asked_sms:
                return largest
            raise NoFreeSms(
                f"{gpu}: asked for {asked_sms} SMs, {sum(sms for sms, _ in runs)} of "
                f"{slots.sm_count} are free, {largest_sms} in one piece"
            )
        if old is not None and around_sms >= size:
            from_here = split.lowest(range(old.units.start, around.stop), size)
            return from_here if split.sms_of(from_here) >= size else split.highest(around, size)
        for one in self._owned.get(owner, ()):
            beside = self._leases[one]
            if beside is old or beside.gpu != gpu or not beside.units:
                continue
            for run in enough:
                if run.start == beside.units.stop:
                    return split.lowest(run, size)
                if run.stop == beside.units.start:
                    return split.highest(run, size)
        return split.lowest(min(enough, key=len), size)

    def _made(self, lease_id: int, gpu: str, owner: str, units: range) -> SmLease:
        slots = self._gpus[gpu]
        sms = slots.split.sms_of(units)
        return SmLease(lease_id, gpu, owner, units, slots.within(sms), sms)

    def _put(self, lease: SmLease) -> None:
        self._place(lease)
        self._owned[lease.owner].add(lease.id)

    def _place(self, lease: SmLease) -> None:
        self._leases[lease.id] = lease
        if lease.units:
            bisect.insort(self._placed[lease.gpu], (lease.units.start, lease))

    def _displace(self, lease: SmLease) -> None:
        if lease.units:
            placed = self._placed[lease.gpu]
            del placed[bisect.bisect_left(placed, (lease.units.start,))]

    def _take(self, lease: SmLease) -> None:
        self._displace(lease)
        del self._leases[lease.id]
        owned = self._owned[lease.owner]
        owned.discard(lease.id)
        if not owned:
            del self._owned[lease.owner]


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _joined(one: range, other: range) -> range:
    """Both, where one begins where the other ends, or is empty."""
    if not one or not other:
        return one or other
    low, high = (one, other) if one.start < other.start else (other, one)
    if low.stop != high.start:
        raise ValueError(
            f"a border is between neighbours: units {_shown(low)} and {_shown(high)} are none"
        )
    return range(low.start, high.stop)


def _shown(units: range) -> str:
    return f"{units.start} to {units.stop - 1}" if units else "none"
