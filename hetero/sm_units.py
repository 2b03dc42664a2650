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

SM_SLOTS = 10


def sm_granularity(compute_capability: tuple[int, int]) -> int:
    """Return the SMs of the smallest green context, by ``cuDevSmResourceSplitByCount``'s guideline.

    Source: "Green Contexts", CUDA Driver API. The driver decides (``sm.minSmPartitionSize``).
    """
    major = compute_capability[0]
    return 8 if major >= 9 else {8: 4, 7: 2}.get(major, 1)


class SmSplit:
    """The split of a GPU or MIG device into units, equal in every process.

    Unit ``n`` begins after ``before[n]`` SMs. The last one also has ``rest_sms``, which the split
    leaves over.
    """

    def __init__(self, sm_count: int, unit_sms: int) -> None:
        if sm_count < 1:
            raise ValueError(f"a GPU with {sm_count} SMs has no slots")
        self.sm_count = sm_count
        self.unit_sms = min(unit_sms, sm_count)
        self.units = sm_count // self.unit_sms
        self.rest_sms = sm_count % self.unit_sms
        starts = range(0, sm_count - self.rest_sms, self.unit_sms)
        self.before: tuple[int, ...] = (*starts, sm_count)

    def sms_of(self, units: range) -> int:
        return self.before[units.stop] - self.before[units.start]

    def lowest(self, units: range, least_sms: int) -> range:
        """Return the fewest units from the low end with at least these SMs, or all of them."""
        stop = bisect.bisect_left(self.before, self.before[units.start] + least_sms)
        return range(units.start, min(stop, units.stop))


class SmSlots:
    """The ten slots of a GPU or MIG device.

    Slot ``k`` of ``sizes`` has at least ``k`` tenths of the SMs in whole units. ``borders`` has the
    unit nearest to each tenth; slots between borders fit beside each other, whatever the rounding.
    """

    def __init__(self, sm_count: int, unit_sms: int) -> None:
        self.sm_count = sm_count
        self.split = SmSplit(sm_count, unit_sms)
        everything = range(self.split.units)
        tenths = (-(-sm_count * slot // SM_SLOTS) for slot in range(SM_SLOTS + 1))
        self.sizes = tuple(
            self.split.sms_of(self.split.lowest(everything, least_sms)) for least_sms in tenths
        )
        units = self.split.units
        self.borders = tuple(
            (2 * units * slot + SM_SLOTS) // (2 * SM_SLOTS) for slot in range(SM_SLOTS + 1)
        )

    def within(self, sms: int) -> int:
        """Return the largest slot that has no more SMs than these."""
        return bisect.bisect_right(self.sizes, sms) - 1
