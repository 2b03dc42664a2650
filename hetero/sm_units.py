"""Splits a GPU's streaming multiprocessors into numbered units, and makes ten slots of them. Pure.

AgentServe (section III-C) makes ten CUDA green contexts before it serves, of 10 % to 100 % of a
GPU's SMs. A context is made of units that a split of the device hands out, and every process that
makes the same split gets the same units. So each process splits a GPU by the same call, into the
smallest units of its architecture, and contexts of different units share no SM.

The call is ``cuDevSmResourceSplitByCount(units, &count, &device_sms, &rest, 0, split.unit_sms)``
with room for ``split.units`` units. It has to return that many of that size, and a rest of
``split.rest_sms``, which goes with the last unit. Otherwise the driver's split is not the ledger's,
and no lease holds. (``cuDevSmResourceSplit``, which takes sizes, needs CUDA 13.1.)
"""

import bisect
from dataclasses import dataclass

SM_SLOTS = 10


@dataclass(frozen=True, slots=True)
class SmGranularity:
    """SM counts that a GPU can be partitioned into: multiples of one number, from a minimum on."""

    minimum: int
    multiple: int


def sm_granularity(compute_capability: tuple[int, int]) -> SmGranularity:
    """Return the granularity of green contexts, by the guideline for
    ``cuDevSmResourceSplitByCount``.

    Source: "Green Contexts", CUDA Driver API. The driver decides (``sm.minSmPartitionSize``).
    """
    major = compute_capability[0]
    if major >= 9:
        return SmGranularity(8, 8)
    return {8: SmGranularity(4, 2), 7: SmGranularity(2, 2)}.get(major, SmGranularity(1, 1))


class SmSplit:
    """The split of a GPU or MIG device into units, equal in every process.

    Unit ``n`` begins after ``before[n]`` SMs. The last one also has ``rest_sms``, which the split
    leaves over.
    """

    def __init__(self, sm_count: int, allowed: SmGranularity) -> None:
        if sm_count < 1:
            raise ValueError(f"a GPU with {sm_count} SMs has no slots")
        unit_sms = -(-allowed.minimum // allowed.multiple) * allowed.multiple
        self.sm_count = sm_count
        self.unit_sms = min(unit_sms, sm_count)
        self.units = sm_count // self.unit_sms
        self.rest_sms = sm_count % self.unit_sms
        starts = range(0, sm_count - self.rest_sms, self.unit_sms)
        self.before: tuple[int, ...] = (*starts, sm_count)

    def sms_of(self, units: range) -> int:
        return self.before[units.stop] - self.before[units.start]

    def lowest(self, units: range, least_sms: int) -> range:
        """Return the fewest units from the low end with so many SMs; all if they have fewer."""
        stop = bisect.bisect_left(self.before, self.before[units.start] + least_sms)
        return range(units.start, min(stop, units.stop))

    def highest(self, units: range, least_sms: int) -> range:
        """Return the fewest units from the high end with so many SMs; all if they have fewer."""
        start = bisect.bisect_right(self.before, self.before[units.stop] - least_sms) - 1
        return range(max(start, units.start), units.stop)


class SmSlots:
    """The ten slots of a GPU or MIG device.

    Slot ``k`` of ``sizes`` has at least ``k`` tenths of the SMs in whole units. ``borders`` has the
    unit nearest to each tenth; slots between borders fit beside each other, whatever the rounding.
    """

    def __init__(self, sm_count: int, allowed: SmGranularity) -> None:
        self.sm_count = sm_count
        self.split = SmSplit(sm_count, allowed)
        everything = range(self.split.units)
        tenths = (-(-sm_count * slot // SM_SLOTS) for slot in range(SM_SLOTS + 1))
        self.sizes = tuple(
            self.split.sms_of(self.split.lowest(everything, least_sms)) for least_sms in tenths
        )
        units = self.split.units
        self.borders = tuple(
            (2 * units * slot + SM_SLOTS) // (2 * SM_SLOTS) for slot in range(SM_SLOTS + 1)
        )

    def complement(self, slot: int) -> int:
        """Return the SMs outside of this slot: prefill's, if decoding has the slot."""
        return self.sm_count - self.sizes[slot]

    def smallest(self, asked_sms: int) -> int:
        """Return the smallest slot with at least so many SMs.

        Raises:
            ValueError: the GPU has fewer, or fewer than one was asked for.
        """
        if not 1 <= asked_sms <= self.sm_count:
            raise ValueError(f"asked for {asked_sms} of {self.sm_count} SMs")
        return bisect.bisect_left(self.sizes, asked_sms)

    def within(self, sms: int) -> int:
        """Return the largest slot with at most so many SMs."""
        return bisect.bisect_right(self.sizes, sms) - 1

    def sms(self, share: float) -> int:
        """Return a share (0 to 1) of the SMs, rounded up, at least 1."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} is not between 0 and 1")
        # The subtraction keeps 0.3 * 10 from becoming 4.
        return max(1, -int(-(share * self.sm_count - 1e-9) // 1))
