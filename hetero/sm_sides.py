"""The two sides of an engine's SMs, decoding's and prefill's, for each size of decoding's.

AgentServe (§III-C) has a context for each of ten slots, and prefill gets the complement of
decoding's. Here an engine has a lease, and its ten slots are tenths of that. Decoding keeps the low
end; the sides of one size share no unit. Pure.
"""

from typing import NamedTuple

from hetero.sm_units import SM_SLOTS, SmSplit


class Sides(NamedTuple):
    """One place of the border.

    Attributes:
        decode: decoding's units.
        prefill: the rest of the engine's; none where decoding has all.
        decode_sms: how many SMs decoding's are.
    """

    decode: range
    prefill: range
    decode_sms: int


def sides(split: SmSplit, units: range) -> tuple[Sides, ...]:
    """Each place that the border may have, by decoding's size, the smallest first.

    Slot ``k`` has at least ``k`` tenths of the lease, in whole units; slots that come to the same
    are one. The last has all.

    Args:
        units: of the engine's lease.
    """
    total_sms = split.sms_of(units)
    found: list[Sides] = []
    for slot in range(1, SM_SLOTS + 1):
        decode = split.lowest(units, -(-total_sms * slot // SM_SLOTS))
        if not found or decode != found[-1].decode:
            prefill = range(decode.stop, units.stop)
            found.append(Sides(decode, prefill, split.sms_of(decode)))
    return tuple(found)
