"""A GPU's split into units, its ten slots, and the two sides of a lease."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.sm_units import SM_SLOTS, SmSlots, SmSplit, sides, sm_granularity

CAPABILITIES = st.sampled_from([(6, 1), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
GPUS = st.builds(
    lambda sms, capability: SmSlots(sms, sm_granularity(capability)),
    st.integers(1, 200),
    CAPABILITIES,
)


@given(GPUS, st.data())
def test_units_are_all_sms_each_once(gpu: SmSlots, data: st.DataObject) -> None:
    """Wherever a line is drawn between them."""
    split = gpu.split
    border = data.draw(st.integers(0, split.units))
    low, high = range(border), range(border, split.units)
    assert split.sms_of(low) + split.sms_of(high) == gpu.sm_count
    assert split.sms_of(low) == border * split.unit_sms or not high
    assert split.units * split.unit_sms + split.rest_sms == gpu.sm_count
    assert split.rest_sms < split.unit_sms


@given(GPUS, st.data())
def test_no_fewer_units_would_do(gpu: SmSlots, data: st.DataObject) -> None:
    split = gpu.split
    start = data.draw(st.integers(0, split.units))
    run = range(start, data.draw(st.integers(start, split.units)))
    least = data.draw(st.integers(0, gpu.sm_count))
    taken = split.lowest(run, least)
    assert set(taken) <= set(run)
    if split.sms_of(taken) < least:
        assert taken == run
    else:
        assert not taken or split.sms_of(taken[:-1]) < least
    assert taken.start == run.start


@given(GPUS)
def test_tenths_lie_beside_each_other_and_are_all_units(gpu: SmSlots) -> None:
    borders = gpu.borders
    assert (len(borders), borders[0], borders[-1]) == (SM_SLOTS + 1, 0, gpu.split.units)
    for slot, border in enumerate(borders):
        assert abs(border * SM_SLOTS - gpu.split.units * slot) <= SM_SLOTS / 2


@given(GPUS)
def test_a_slot_has_at_least_its_tenths_and_no_unit_too_many(gpu: SmSlots) -> None:
    unit_sms = gpu.split.unit_sms
    for slot in range(1, SM_SLOTS):
        size = gpu.sizes[slot]
        assert size * SM_SLOTS >= gpu.sm_count * slot
        if size < gpu.sm_count:
            assert size % unit_sms == 0
            assert (size - unit_sms) * SM_SLOTS < gpu.sm_count * slot
    assert list(gpu.sizes) == sorted(gpu.sizes)
    assert (gpu.sizes[0], gpu.sizes[SM_SLOTS]) == (0, gpu.sm_count)


def test_an_h100_is_sixteen_units_of_eight_and_four_sms_that_the_last_has_too() -> None:
    gpu = SmSlots(132, sm_granularity((9, 0)))
    assert (gpu.split.units, gpu.split.unit_sms, gpu.split.rest_sms) == (16, 8, 4)
    assert gpu.sizes == (0, 16, 32, 40, 56, 72, 80, 96, 112, 120, 132)
    assert gpu.split.sms_of(range(14, 16)) == 20


def test_a_gpu_smaller_than_a_unit_is_one() -> None:
    for sms in (1, 7, 8, 15):
        split = SmSplit(sms, sm_granularity((9, 0)))
        assert (split.units, split.sms_of(range(1))) == (1, sms)
    with pytest.raises(ValueError, match="has no slots"):
        SmSplit(0, sm_granularity((9, 0)))


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
