"""A GPU's streaming multiprocessors, split into numbered units, and its ten slots of them.

AgentServe (§III-C) makes ten CUDA green contexts before it serves, of 10 % to 100 % of a GPU's
SMs. A context is made of what a split of the device hands out, and every process that splits
"16 SMs" off gets the same ones. So a GPU is split once, by the same call in every process, into
units as small as its architecture allows; a context is made of the units that a lease names, and
contexts of different units share no SM.

The call is ``cuDevSmResourceSplitByCount(units, &count, &device_sms, &rest, 0, split.unit_sms)``
with room for ``split.units`` of them, and has to answer that many of that size and a rest of
``split.rest_sms``: else the driver's split is another than the ledger's, and no lease holds. Units
of one split can be put together (``cuDevResourceGenerateDesc``). The rest goes with the last unit.
(``cuDevSmResourceSplit``, which takes sizes, needs CUDA 13.1.)

Pure: no driver.
"""

import bisect
from dataclasses import dataclass

SM_SLOTS = 10


@dataclass(frozen=True, slots=True)
class SmGranularity:
    """The SM counts that a GPU can be partitioned into: a multiple, and at least a minimum."""

    minimum: int
    multiple: int


def sm_granularity(compute_capability: tuple[int, int]) -> SmGranularity:
    """Return what green contexts round to, by architecture.

    Source: "Green Contexts" in NVIDIA's CUDA Driver API reference, its guideline for
    ``cuDevSmResourceSplitByCount``: 1 SM on 6.x, 2 in steps of 2 on 7.x, 4 in steps of 2 on 8.x,
    8 in steps of 8 from 9.0 on. The driver has the last word
    (``sm.minSmPartitionSize`` and ``sm.smCoscheduledAlignment`` of the device's resource).
    """
    major = compute_capability[0]
    if major >= 9:
        return SmGranularity(8, 8)
    return {8: SmGranularity(4, 2), 7: SmGranularity(2, 2)}.get(major, SmGranularity(1, 1))


class SmSplit:
    """How a GPU, or a MIG device, is split into units: the same in every process.

    Args:
        sm_count: SMs of the whole GPU or MIG device, at least 1.
        allowed: the sizes into which it can be partitioned.

    Attributes:
        unit_sms: SMs of a unit: the fewest that can be had by themselves.
        units: how many units there are, at least 1; they have the numbers from 0 on.
        before: how many SMs the units before each have, and all.
        rest_sms: what the split leaves over, which the last unit has besides. A GPU that is smaller
            than a unit is one unit and not split at all.
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
        """How many SMs these units have together, the rest included where they have the last."""
        return self.before[units.stop] - self.before[units.start]

    def lowest(self, units: range, least_sms: int) -> range:
        """As few of these units as have so many SMs, from the low end; all, if they have fewer."""
        stop = bisect.bisect_left(self.before, self.before[units.start] + least_sms)
        return range(units.start, min(stop, units.stop))

    def highest(self, units: range, least_sms: int) -> range:
        """As few of these units as have so many SMs, from the high end; all, if they have fewer."""
        start = bisect.bisect_right(self.before, self.before[units.stop] - least_sms) - 1
        return range(max(start, units.start), units.stop)


class SmSlots:
    """The ten slots of one GPU, or of one MIG device.

    Slot ``k`` has at least ``k`` tenths of the SMs, rounded up to whole units, and at most all of
    them. Its complement is the rest.

    Args:
        sm_count: SMs of the whole GPU or MIG device, at least 1.
        allowed: the sizes into which it can be partitioned.

    Attributes:
        split: the units that slots are made of.
        sizes: how many SMs each of the slots 0 (none) to 10 (all) has, non-decreasing.
        borders: the unit with which each tenth begins, and the last one ends, to the nearest. From
            one border to another are any number of slots, and what begins where another ends fits
            beside it, whatever the rounding.
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

    def within(self, sms: int) -> int:
        """The largest slot that has no more than so many SMs."""
        return bisect.bisect_right(self.sizes, sms) - 1

    def sms(self, share: float) -> int:
        """A share of the SMs, from 0 to 1, as a number of them: rounded up, at least 1."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} is not between 0 and 1")
        # Less a little, so that 0.3 * 10 is 3.
        return max(1, -int(-(share * self.sm_count - 1e-9) // 1))
