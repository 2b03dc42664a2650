"""Keeps the ledger of the SMs that engines have leased, in units of `hetero.sm_units`. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hetero.sm_units import SM_SLOTS, SmSlots


class NoFreeSms(Exception):
    """Fewer SMs of that GPU are free in one piece than were asked for; nothing has changed."""


class SmLease(NamedTuple):
    """SMs of one GPU or MIG device that only their owner has.

    ``units`` are numbers of units next to each other, with ``sms`` SMs in all, which hold
    ``slots`` of the ten slots.
    """

    id: int
    gpu: str
    owner: str
    units: range
    slots: int
    sms: int


class SmSlotLedger:
    """Leases units of GPUs, none of them twice.

    Leases never move, so free units may lie in pieces of which none is enough.

    Args:
        gpus: the slots of each GPU or MIG device, by UUID.
        first_id: higher than every id that an earlier ledger gave.
    """

    def __init__(self, gpus: Mapping[str, SmSlots], first_id: int = 1) -> None:
        self._gpus = dict(gpus)
        self._leases: dict[int, SmLease] = {}
        self._next_id = first_id

    def lease_slots(self, gpu: str, owner: str, slots: int) -> SmLease:
        """Lease tenths of a GPU, from the smallest free run that has them.

        A lease goes from one tenth's border to another's, so slots that add up to ten have room
        beside each other, in any order. Where it lies changes its SMs by one unit.

        Raises:
            NoFreeSms: they are not free in one piece.
            KeyError: there is no such GPU here.
            ValueError: a GPU does not have that number of slots.
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
            holders = ", ".join(f"{one.owner} has {_shown(one.units)}" for one in self._on(gpu))
            raise NoFreeSms(
                f"{gpu}: {slots} of {SM_SLOTS} slots are not free in one piece"
                + (f": {holders} of {self._gpus[gpu].split.units} units" if holders else "")
            )
        return self._add(self._next_id, gpu, owner, min(places)[2])

    def restore(self, lease: SmLease) -> None:
        """Take in a lease of an earlier ledger, whose owner still has its contexts.

        Raises:
            NoFreeSms: another owner has units of it now.
            KeyError: there is no such GPU here.
            ValueError: the GPU does not have these units, or the id is another lease's.
        """
        split = self._gpus[lease.gpu].split
        if not 0 <= lease.units.start < lease.units.stop <= split.units:
            raise ValueError(f"{lease.gpu} has {split.units} units, and not {_shown(lease.units)}")
        known = self._leases.get(lease.id)
        if known == lease:
            return
        if known is not None:
            raise ValueError(f"lease {lease.id} is another one")
        for other in self._on(lease.gpu):
            if max(other.units.start, lease.units.start) < min(other.units.stop, lease.units.stop):
                raise NoFreeSms(
                    f"{lease.gpu}: units {_shown(lease.units)} are not free, since {other.owner} "
                    f"has {_shown(other.units)}"
                )
        self._add(lease.id, lease.gpu, lease.owner, lease.units)

    def release_owner(self, owner: str) -> list[SmLease]:
        return self._end([lease for lease in self.leases() if lease.owner == owner])

    def keep_owners(self, alive: Iterable[str]) -> list[SmLease]:
        """End the leases of all other owners, and return them."""
        kept = set(alive)
        return self._end([lease for lease in self.leases() if lease.owner not in kept])

    def leases(self) -> list[SmLease]:
        """Return all leases, the oldest first."""
        return sorted(self._leases.values(), key=lambda lease: lease.id)

    def free(self, gpu: str) -> list[range]:
        """Return the free units of a GPU in runs, from the lowest on."""
        runs, start = [], 0
        for lease in self._on(gpu):
            runs.append(range(start, lease.units.start))
            start = lease.units.stop
        runs.append(range(start, self._gpus[gpu].split.units))
        return [run for run in runs if run]

    def _on(self, gpu: str) -> list[SmLease]:
        """Return the leases of a GPU, from the lowest units on."""
        here = (lease for lease in self._leases.values() if lease.gpu == gpu)
        return sorted(here, key=lambda lease: lease.units.start)

    def _add(self, lease_id: int, gpu: str, owner: str, units: range) -> SmLease:
        slots = self._gpus[gpu]
        sms = slots.split.sms_of(units)
        self._next_id = max(self._next_id, lease_id + 1)
        self._leases[lease_id] = SmLease(lease_id, gpu, owner, units, slots.within(sms), sms)
        return self._leases[lease_id]

    def _end(self, leases: list[SmLease]) -> list[SmLease]:
        for lease in leases:
            del self._leases[lease.id]
        return leases


def _shown(units: range) -> str:
    return f"{units.start} to {units.stop - 1}" if units else "none"
