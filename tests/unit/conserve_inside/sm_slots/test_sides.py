"""The two sides of a lease: decoding's units and prefill's."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_inside.sm_slots.pairs import sides
from hetero.sm_units import SmSlots, sm_granularity


def test_a_whole_gpu_has_the_papers_ten_slots() -> None:
    slots = SmSlots(132, sm_granularity((9, 0)))
    found = sides(slots.split, range(16))
    assert [one.decode_sms for one in found] == list(slots.sizes[1:])
    assert found[-1].decode == range(16)
    assert len(found[-1].prefill) == 0


def test_a_lease_is_parted_as_a_whole_gpu_would_be() -> None:
    split = SmSlots(132, sm_granularity((9, 0))).split
    found = sides(split, range(5, 16))  # Seven tenths: 92 SMs.
    assert [one.decode_sms for one in found] == [16, 24, 32, 40, 48, 56, 72, 80, 92]
    assert found[0] == (range(5, 7), range(7, 16), 16)
    assert found[-2] == (range(5, 15), range(15, 16), 80)


@pytest.mark.parametrize("units", [range(1), range(3, 4)])
def test_one_unit_cannot_be_parted(units: range) -> None:
    split = SmSlots(132, sm_granularity((9, 0))).split
    assert [one.decode for one in sides(split, units)] == [units]


@given(
    sms=st.integers(1, 200),
    capability=st.sampled_from([(7, 5), (8, 6), (9, 0), (12, 0)]),
    data=st.data(),
)
def test_sides_share_nothing_and_are_all_of_the_lease(
    sms: int, capability: tuple[int, int], data: st.DataObject
) -> None:
    split = SmSlots(sms, sm_granularity(capability)).split
    start = data.draw(st.integers(0, split.units - 1))
    units = range(start, data.draw(st.integers(start + 1, split.units)))
    found = sides(split, units)
    assert len(found) <= 10
    assert found[-1].decode == units
    for one in found:
        assert [*one.decode, *one.prefill] == list(units)
        assert one.decode_sms == split.sms_of(one.decode) > 0
    for one, next_one in pairwise(found):
        assert one.decode_sms < next_one.decode_sms
