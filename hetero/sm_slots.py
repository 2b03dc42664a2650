"""SM slots: a GPU's streaming multiprocessors in tenths, and who has leased them.

AgentServe (§III-C) makes ten CUDA green contexts before it serves, of 10 % to 100 % of a GPU's
SMs, and binds decoding to the smallest that has at least the SMs it needs; prefill gets the
complement. Here is the arithmetic of that, and a ledger of leases for several engines on one
GPU. Making the contexts, and binding threads to them, is the engine's work.

Pure: no clock, no driver, one thread at a time.
"""

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SM_SLOTS = 10


class NoFreeSms(Exception):
    """Fewer SMs are free on that GPU than were asked for; nothing has changed."""


class UnknownSmLease(KeyError):
    """There is no such lease (any more): its owner may have been taken for dead."""


@dataclass(frozen=True, slots=True)
class SmGranularity:
    """The SM counts that a GPU can be partitioned into: a multiple, and at least a minimum."""

    minimum: int
    multiple: int


def sm_granularity(compute_capability: tuple[int, int]) -> SmGranularity:
    """What green contexts round to, by architecture.

    Source: "Green Contexts" in NVIDIA's CUDA Driver API reference, its guideline for
    ``cuDevSmResourceSplitByCount``: 1 SM on 6.x, 2 in steps of 2 on 7.x, 4 in steps of 2 on 8.x,
    8 in steps of 8 from 9.0 on. The driver has the last word
    (``sm.minSmPartitionSize`` and ``sm.smCoscheduledAlignment`` of the device's resource).
    """
    major = compute_capability[0]
    if major >= 9:
        return SmGranularity(8, 8)
    return {8: SmGranularity(4, 2), 7: SmGranularity(2, 2)}.get(major, SmGranularity(1, 1))


class SmSlots:
    """The ten slots of one GPU, or of one MIG device.

    Slot ``k`` has at least ``k`` tenths of the SMs, rounded up to what the architecture allows,
    and at most all of them. Its complement is the rest: what a split leaves over, which may be
    of any size.

    Args:
        sm_count: SMs of the whole GPU or MIG device, at least 1.
        allowed: the sizes into which it can be partitioned.

    Attributes:
        sizes: how many SMs each of the slots 0 (none) to 10 (all) has, non-decreasing.
    """

    def __init__(self, sm_count: int, allowed: SmGranularity) -> None:
        if sm_count < 1:
            raise ValueError(f"a GPU with {sm_count} SMs has no slots")
        self.sm_count = sm_count
        self.allowed = allowed
        self.sizes = tuple(self._size(tenths) for tenths in range(SM_SLOTS + 1))

    def _size(self, tenths: int) -> int:
        if tenths in (0, SM_SLOTS):
            return self.sm_count * tenths // SM_SLOTS
        least = max(self.allowed.minimum, -(-self.sm_count * tenths // SM_SLOTS))
        rounded = -(-least // self.allowed.multiple) * self.allowed.multiple
        return min(rounded, self.sm_count)

    def complement(self, slot: int) -> int:
        """SMs outside of this slot: prefill's, where decoding has the slot."""
        return self.sm_count - self.sizes[slot]

    def smallest(self, asked_sms: int) -> int:
        """The smallest slot with at least so many SMs.

        Raises:
            ValueError: the GPU has fewer, or fewer than one was asked for.
        """
        if not 1 <= asked_sms <= self.sm_count:
            raise ValueError(f"asked for {asked_sms} of {self.sm_count} SMs")
        return bisect.bisect_left(self.sizes, asked_sms)

    def sms(self, share: float) -> int:
        """A share of the SMs, from 0 to 1, as a number of them: rounded up, at least 1."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} is not between 0 and 1")
        # Less a little, so that 0.3 * 10 is 3.
        return max(1, -int(-(share * self.sm_count - 1e-9) // 1))


@dataclass(frozen=True, slots=True)
class SmLease:
    """SMs of one GPU that one owner has for itself.

    Attributes:
        gpu: the GPU's UUID, or a MIG device's.
        slots: tenths of the GPU, from 1 to 10; 0 for a prefill side that decoding has squeezed out.
        sms: how many SMs those are.
    """

    id: int
    gpu: str
    owner: str
    slots: int
    sms: int


@dataclass(slots=True)
class _Free:
    slots: int
    sms: int


class SmSlotLedger:
    """Who has leased which SMs of which GPU. Never more is leased than there is.

    A lease gets the smallest slot with at least the SMs asked for; one that needs all that is
    left gets all that is left, so that ten tenths are all SMs, whatever the rounding.

    Args:
        gpus: the slots of each GPU or MIG device, by UUID.
    """

    def __init__(self, gpus: Mapping[str, SmSlots]) -> None:
        self._gpus = dict(gpus)
        self._free = {uuid: _Free(SM_SLOTS, gpu.sm_count) for uuid, gpu in self._gpus.items()}
        self._leases: dict[int, SmLease] = {}
        self._owned: dict[str, set[int]] = {}
        self._next_id = 1

    def lease(self, gpu: str, owner: str, asked_sms: int) -> SmLease:
        """Lease at least so many SMs of a GPU.

        Raises:
            NoFreeSms: they are not free.
            KeyError: there is no such GPU here.
            ValueError: the GPU has fewer.
        """
        slots, sms = self._fit(gpu, asked_sms, self._free[gpu])
        lease = SmLease(self._next_id, gpu, owner, slots, sms)
        self._next_id += 1
        self._put(lease)
        return lease

    def rebind(self, lease_id: int, asked_sms: int) -> SmLease:
        """Change a lease to the smallest slot with at least so many SMs; it keeps its id.

        Raises:
            NoFreeSms: they are not free; the lease stays as it was.
            UnknownSmLease: it is gone.
        """
        old = self.get(lease_id)
        free = self._free[old.gpu]
        slots, sms = self._fit(
            old.gpu, asked_sms, _Free(free.slots + old.slots, free.sms + old.sms)
        )
        self._take(old)
        lease = SmLease(old.id, old.gpu, old.owner, slots, sms)
        self._put(lease)
        return lease

    def split(self, decode_id: int, prefill_id: int, asked_sms: int) -> tuple[SmLease, SmLease]:
        """Move the border between two leases of one GPU (AgentServe's rebinding).

        Decoding gets the smallest slot with at least so many SMs of what the two have together,
        prefill the rest of it, which may be none.

        Raises:
            NoFreeSms: they have not so many together; both stay as they were.
            UnknownSmLease: one is gone.
            ValueError: they are not two leases of one GPU.
        """
        decode, prefill = self.get(decode_id), self.get(prefill_id)
        if decode.gpu != prefill.gpu or decode_id == prefill_id:
            raise ValueError("a border is between two leases of one GPU")
        both = _Free(decode.slots + prefill.slots, decode.sms + prefill.sms)
        slots, sms = self._fit(decode.gpu, asked_sms, both)
        self._take(decode)
        self._take(prefill)
        decode = SmLease(decode.id, decode.gpu, decode.owner, slots, sms)
        prefill = SmLease(
            prefill.id, prefill.gpu, prefill.owner, both.slots - slots, both.sms - sms
        )
        self._put(decode)
        self._put(prefill)
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

    def free(self, gpu: str) -> tuple[int, int]:
        """Slots and SMs of a GPU that nobody has."""
        left = self._free[gpu]
        return left.slots, left.sms

    def _fit(self, gpu: str, asked_sms: int, free: _Free) -> tuple[int, int]:
        slots = self._gpus[gpu]
        wanted = slots.smallest(asked_sms)
        if wanted < free.slots and slots.sizes[wanted] <= free.sms:
            return wanted, slots.sizes[wanted]
        if free.slots and free.sms >= max(asked_sms, slots.allowed.minimum):
            return free.slots, free.sms
        if wanted == SM_SLOTS == free.slots:  # A GPU of fewer SMs than the minimum, whole.
            return SM_SLOTS, slots.sm_count
        raise NoFreeSms(
            f"{gpu}: asked for {asked_sms} SMs, {free.sms} of {slots.sm_count} are free"
        )

    def _put(self, lease: SmLease) -> None:
        free = self._free[lease.gpu]
        free.slots -= lease.slots
        free.sms -= lease.sms
        self._leases[lease.id] = lease
        self._owned.setdefault(lease.owner, set()).add(lease.id)

    def _take(self, lease: SmLease) -> None:
        free = self._free[lease.gpu]
        free.slots += lease.slots
        free.sms += lease.sms
        del self._leases[lease.id]
        owned = self._owned[lease.owner]
        owned.discard(lease.id)
        if not owned:
            del self._owned[lease.owner]
