"""Splits an engine's SMs between decoding and prefill, for each size of decoding's side. Pure.

AgentServe (section III-C) has ten slots of a GPU; here they are tenths of an engine's lease.
Decoding keeps the low end, and prefill gets its complement.
"""

from typing import NamedTuple

from hetero.sm_units import SM_SLOTS, SmSplit


class Sides(NamedTuple):
    """Decoding's units and SMs at one border, and the rest, which prefill has."""

    decode: range
    prefill: range
    decode_sms: int


def sides(split: SmSplit, units: range) -> tuple[Sides, ...]:
    """Return the sides for each border, by decoding's size, the smallest first; the last has all.

    Slot ``k`` has at least ``k`` tenths of the lease in whole units; equal slots are one.
    """
    total_sms = split.sms_of(units)
    found: list[Sides] = []
    for slot in range(1, SM_SLOTS + 1):
        decode = split.lowest(units, -(-total_sms * slot // SM_SLOTS))
        if not found or decode != found[-1].decode:
            prefill = range(decode.stop, units.stop)
            found.append(Sides(decode, prefill, split.sms_of(decode)))
    return tuple(found)
