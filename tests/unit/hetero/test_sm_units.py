"""A GPU's split into units, and its ten slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.sm_units import SM_SLOTS, SmSlots, SmSplit, sm_granularity

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
