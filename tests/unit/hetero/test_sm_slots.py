"""A ledger of SMs that never leases a unit twice."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero.sm_slots import NoFreeSms, SmLease, SmSlotLedger, UnknownSmLease
from hetero.sm_units import SM_SLOTS, SmGranularity, SmSlots, sm_granularity


def h100() -> SmSlots:
    return SmSlots(132, sm_granularity((9, 0)))


@pytest.mark.parametrize("slots", [0, 11])
def test_a_gpu_has_ten_slots(slots: int) -> None:
    with pytest.raises(ValueError, match=f"asked for {slots} of 10 slots"):
        SmSlotLedger({"a": h100()}).lease_slots("a", "x", slots)


def test_tenths_that_add_up_to_ten_have_room_and_leave_nothing() -> None:
    """Where rounding each up would leave the last one short."""
    for shares in ((3, 7), (7, 3), (5, 5), (2, 2, 2, 2, 2), (1, 1, 8), (1,) * 10):
        ledger = SmSlotLedger({"a": h100()})
        leases = [ledger.lease_slots("a", str(at), share) for at, share in enumerate(shares)]
        assert sum(lease.sms for lease in leases) == 132
        for share, lease in zip(shares, leases, strict=True):
            assert abs(lease.sms - 13.2 * share) <= 8
        with pytest.raises(NoFreeSms, match=r"1 of 10 slots are not free.*0 has 0 to"):
            ledger.lease_slots("a", "late", 1)
        ledger.release(leases[0].id)
        assert ledger.lease_slots("a", "next", shares[0]).units == leases[0].units


def test_slots_go_into_the_smallest_gap() -> None:
    ledger = SmSlotLedger({"a": h100()})
    leases = [ledger.lease_slots("a", str(at), share) for at, share in enumerate((4, 1, 2, 1, 2))]
    ledger.release(leases[0].id)
    ledger.release(leases[2].id)
    assert ledger.lease_slots("a", "small", 2).units == leases[2].units
    with pytest.raises(NoFreeSms, match="5 of 10"):
        ledger.lease_slots("a", "large", 5)
    assert ledger.lease_slots("a", "larger", 4).units == leases[0].units


def test_a_gpu_of_few_units_has_slots_that_are_nothing() -> None:
    ledger = SmSlotLedger({"a": SmSlots(16, sm_granularity((9, 0)))})
    first, second = (ledger.lease_slots("a", owner, 1) for owner in ("x", "y"))
    assert [first.units, second.units] == [range(1), range(1, 2)]
    with pytest.raises(NoFreeSms):
        ledger.lease_slots("a", "z", 1)


@pytest.mark.parametrize("asked", [0, 85])
def test_what_no_gpu_has_is_refused(asked: int) -> None:
    gpu = SmSlots(84, sm_granularity((8, 6)))
    with pytest.raises(ValueError, match=f"asked for {asked} of 84"):
        SmSlotLedger({"a": gpu}).lease("a", "x", asked)


def test_two_engines_that_ask_for_the_same_get_different_sms() -> None:
    ledger = SmSlotLedger({"a": h100()})
    one, other = ledger.lease("a", "one", 16), ledger.lease("a", "other", 16)
    assert (one.sms, other.sms) == (16, 16)
    assert (one.units, other.units) == (range(2), range(2, 4))


def test_ten_tenths_are_all_sms_whatever_the_rounding() -> None:
    ledger = SmSlotLedger({"h100": h100()})
    leases = [ledger.lease("h100", "x", asked) for asked in (40, 40, 52)]
    assert [lease.sms for lease in leases] == [40, 40, 52]  # The last is what is left: no slot.
    assert [lease.slots for lease in leases] == [3, 3, 3]
    assert ledger.free("h100") == []
    with pytest.raises(NoFreeSms, match="0 of 132"):
        ledger.lease("h100", "y", 1)


def test_what_is_freed_can_be_leased_again() -> None:
    ledger = SmSlotLedger({"a": h100()})
    leases = [ledger.lease("a", str(number), 16) for number in range(8)]
    assert ledger.free("a") == []
    ledger.release(leases[3].id)
    assert ledger.lease("a", "new", 16).units == leases[3].units
    for lease in ledger.leases():
        ledger.release(lease.id)
    assert ledger.lease("a", "whole", 132).units == range(16)


def test_pieces_are_not_put_together_and_large_ones_are_spared() -> None:
    ledger = SmSlotLedger({"a": h100()})
    leases = [ledger.lease("a", str(number), 16) for number in range(8)]
    for number in (1, 3, 4):
        ledger.release(leases[number].id)
    assert ledger.free("a") == [range(2, 4), range(6, 10)]
    with pytest.raises(NoFreeSms, match="48 of 132 are free, 32 in one piece"):
        ledger.lease("a", "large", 40)
    # Into the small gap, although the large one is enough as well; then the large one is whole yet.
    assert ledger.lease("a", "small", 10).units == range(2, 4)
    assert ledger.lease("a", "larger", 30).units == range(6, 10)


def test_an_owners_leases_lie_beside_each_other_if_there_is_room() -> None:
    ledger = SmSlotLedger({"a": h100()})
    gap = ledger.lease("a", "gone", 16)
    mine = ledger.lease("a", "me", 16)
    ledger.release(gap.id)
    assert ledger.lease("a", "me", 32).units == range(4, 8)  # There is no room for it below.
    assert ledger.lease("a", "me", 8).units == range(2)
    assert mine.units == range(2, 4)


def test_rebinding_keeps_the_lease_and_refuses_what_others_have() -> None:
    ledger = SmSlotLedger({"a": SmSlots(100, SmGranularity(2, 2))})
    mine, other = ledger.lease("a", "me", 40), ledger.lease("a", "other", 30)
    assert ledger.rebind(mine.id, 21).units == range(15)
    with pytest.raises(NoFreeSms):
        ledger.rebind(mine.id, 41)
    assert ledger.get(mine.id).sms == 30
    assert ledger.get(other.id) == other
    # Where the other has gone it grows from where it is.
    ledger.release(other.id)
    assert ledger.rebind(mine.id, 61).units == range(35)
    assert ledger.rebind(mine.id, 11).units == range(10)
    assert ledger.free_sms("a") == 80


def test_rebinding_moves_where_it_has_no_room_to_grow() -> None:
    ledger = SmSlotLedger({"a": h100()})
    mine = ledger.lease("a", "me", 16)
    ledger.lease("a", "other", 16)
    assert ledger.rebind(mine.id, 32).units == range(4, 8)
    # At the upper end it grows downwards.
    assert ledger.rebind(mine.id, 90).units == range(4, 16)
    assert ledger.rebind(mine.id, 16).units == range(4, 6)


def test_the_border_between_decoding_and_prefill_moves() -> None:
    """What one gives the other gets, and a third's lease is not touched."""
    ledger = SmSlotLedger({"a": SmSlots(64, sm_granularity((8, 6)))})
    decode, prefill = ledger.lease("a", "engine", 26), ledger.lease("a", "engine", 20)
    third = ledger.lease("a", "third", 6)
    together = decode.sms + prefill.sms
    for asked in (1, 7, 24, 26, 40, together):
        decode, prefill = ledger.split(decode.id, prefill.id, asked)
        assert decode.sms >= asked
        assert decode.sms + prefill.sms == together
        assert decode.units.start == 0
        assert prefill.units.start == decode.units.stop
        assert ledger.get(third.id) == third
    assert (len(prefill.units), prefill.slots, prefill.sms) == (0, 0, 0)
    decode, prefill = ledger.split(decode.id, prefill.id, 8)
    assert prefill.sms == together - 8
    with pytest.raises(NoFreeSms):
        ledger.split(decode.id, prefill.id, together + 1)
    with pytest.raises(ValueError, match="two leases"):
        ledger.split(decode.id, decode.id, 8)
    # The other way round, decoding keeps the upper end.
    prefill, decode = ledger.split(prefill.id, decode.id, 20)
    assert decode.units.stop < prefill.units.stop


def test_a_border_is_between_neighbours() -> None:
    ledger = SmSlotLedger({"a": h100()})
    decode, between = ledger.lease("a", "engine", 16), ledger.lease("a", "other", 16)
    prefill = ledger.lease("a", "engine", 16)
    with pytest.raises(ValueError, match="units 0 to 1 and 4 to 5 are none"):
        ledger.split(decode.id, prefill.id, 8)
    assert ledger.leases() == [decode, between, prefill]


def test_an_owner_that_died_holds_nothing() -> None:
    ledger = SmSlotLedger({"a": SmSlots(84, sm_granularity((8, 6)))})
    first, kept = ledger.lease("a", "dead", 20), ledger.lease("a", "alive", 20)
    second = ledger.lease("a", "dead", 10)
    assert ledger.keep_owners(["alive"]) == [first, second]
    assert ledger.leases() == [kept]
    with pytest.raises(UnknownSmLease, match="owner lost"):
        ledger.release(first.id)
    assert ledger.release_owner("dead") == []
    assert ledger.release_owner("alive") == [kept]
    assert ledger.free_sms("a") == 84


def test_a_new_ledger_takes_in_what_an_earlier_one_has_leased() -> None:
    earlier = SmSlotLedger({"a": h100()})
    gone, kept = earlier.lease("a", "gone", 40), earlier.lease("a", "kept", 40)
    squeezed = earlier.split(kept.id, earlier.lease("a", "kept", 8).id, 50)[1]
    kept = earlier.get(kept.id)
    ledger = SmSlotLedger({"a": h100()}, first_id=100)
    ledger.restore(kept)
    ledger.restore(kept)  # Said twice, once meant.
    ledger.restore(squeezed)
    assert ledger.leases() == [kept, squeezed]
    # Nobody is given what was taken in, and whoever comes too late has to lease anew.
    new = ledger.lease("a", "new", 40)
    assert (new.id, new.units) == (100, range(5))
    with pytest.raises(NoFreeSms, match="units 0 to 4 are not free, since new has 0 to 4"):
        ledger.restore(gone)
    assert ledger.leases() == [kept, squeezed, new]
    with pytest.raises(UnknownSmLease):
        ledger.rebind(gone.id, 8)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda lease: SmLease(7, "a", "x", range(14, 17), 2, 24), ValueError),
        (lambda lease: SmLease(7, "b", "x", range(2), 1, 16), KeyError),
        (lambda lease: SmLease(lease.id, "a", "x", range(4, 6), 1, 16), ValueError),
    ],
)
def test_a_lease_that_no_ledger_gave_is_not_taken_in(
    spoil: Callable[[SmLease], SmLease], error: type[Exception]
) -> None:
    ledger = SmSlotLedger({"a": h100()})
    lease = ledger.lease("a", "x", 16)
    with pytest.raises(error):
        ledger.restore(spoil(lease))
    assert ledger.leases() == [lease]


class LedgerMachine(RuleBasedStateMachine):
    """Any order of calls, by any owners, on GPUs of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus = {
            "h100": h100(),
            "a40": SmSlots(84, sm_granularity((8, 6))),
            "small": SmSlots(10, sm_granularity((9, 0))),
        }
        self.ledger = SmSlotLedger(self.gpus)

    def _largest_sms(self, gpu: str) -> int:
        return max(map(self.gpus[gpu].split.sms_of, self.ledger.free(gpu)), default=0)

    @rule(
        gpu=st.sampled_from(["h100", "a40", "small"]), owner=st.sampled_from("abc"), data=st.data()
    )
    def lease(self, gpu: str, owner: str, data: st.DataObject) -> None:
        asked = data.draw(st.integers(1, self.gpus[gpu].sm_count))
        before, largest_sms = self.ledger.leases(), self._largest_sms(gpu)
        try:
            lease = self.ledger.lease(gpu, owner, asked)
        except NoFreeSms:
            assert largest_sms < asked
            assert self.ledger.leases() == before
        else:
            assert asked <= lease.sms <= largest_sms
            assert self.ledger.leases() == [*before, lease]

    @rule(
        gpu=st.sampled_from(["h100", "a40", "small"]),
        owner=st.sampled_from("abc"),
        slots=st.integers(1, SM_SLOTS),
    )
    def lease_slots(self, gpu: str, owner: str, slots: int) -> None:
        before = self.ledger.leases()
        try:
            lease = self.ledger.lease_slots(gpu, owner, slots)
        except NoFreeSms:
            assert self.ledger.leases() == before
            assert before or self.gpus[gpu].split.units < SM_SLOTS
        else:
            assert lease.units
            assert self.ledger.leases() == [*before, lease]

    @precondition(lambda self: self.ledger.leases())
    @rule(data=st.data())
    def rebind(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.ledger.leases()))
        asked = data.draw(st.integers(1, self.gpus[old.gpu].sm_count))
        try:
            new = self.ledger.rebind(old.id, asked)
        except NoFreeSms:
            assert self._largest_sms(old.gpu) < asked
            assert old.sms < asked
            assert self.ledger.get(old.id) == old
        else:
            assert new.sms >= asked
            assert (new.id, new.owner, new.gpu) == (old.id, old.owner, old.gpu)

    @precondition(lambda self: len(self.ledger.leases()) > 1)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        decode = data.draw(st.sampled_from(self.ledger.leases()))
        beside = [
            other for other in self.ledger.leases() if other.gpu == decode.gpu and other != decode
        ]
        if not beside:
            return
        prefill = data.draw(st.sampled_from(beside))
        asked = data.draw(st.integers(1, self.gpus[decode.gpu].sm_count))
        before, free = self.ledger.leases(), self.ledger.free(decode.gpu)
        try:
            new, rest = self.ledger.split(decode.id, prefill.id, asked)
        except (NoFreeSms, ValueError):
            assert self.ledger.leases() == before
        else:
            assert new.sms >= asked
            assert new.sms + rest.sms == decode.sms + prefill.sms
        assert self.ledger.free(decode.gpu) == free

    @precondition(lambda self: self.ledger.leases())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ledger.leases()))
        free_sms = self.ledger.free_sms(lease.gpu)
        self.ledger.release(lease.id)
        assert self.ledger.free_sms(lease.gpu) == free_sms + lease.sms

    @rule(owner=st.sampled_from("abc"))
    def owner_dies(self, owner: str) -> None:
        self.ledger.release_owner(owner)
        assert all(lease.owner != owner for lease in self.ledger.leases())

    @rule(data=st.data())
    def its_actor_dies(self, data: st.DataObject) -> None:
        """Its owners say what they have, in any order, and nothing is lost."""
        before = self.ledger.leases()
        self.ledger = SmSlotLedger(self.gpus, first_id=1000)
        for lease in data.draw(st.permutations(before)):
            self.ledger.restore(lease)
        assert self.ledger.leases() == before

    @invariant()
    def no_unit_is_leased_twice(self) -> None:
        for uuid, gpu in self.gpus.items():
            here = [lease for lease in self.ledger.leases() if lease.gpu == uuid]
            units = [unit for lease in here for unit in lease.units]
            units += [unit for run in self.ledger.free(uuid) for unit in run]
            assert sorted(units) == list(range(gpu.split.units))
            assert sum(lease.sms for lease in here) + self.ledger.free_sms(uuid) == gpu.sm_count
            for lease in here:
                assert lease.sms == gpu.split.sms_of(lease.units)
                assert gpu.sizes[lease.slots] <= lease.sms
                assert lease.slots == SM_SLOTS or gpu.sizes[lease.slots + 1] > lease.sms


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
