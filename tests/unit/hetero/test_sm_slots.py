"""A ledger of SMs that never leases a unit twice."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hetero.sm_slots import NoFreeSms, SmLease, SmSlotLedger
from hetero.sm_units import SM_SLOTS, SmSlots, sm_granularity


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
        ledger.release_owner("0")
        assert ledger.lease_slots("a", "next", shares[0]).units == leases[0].units


def test_slots_go_into_the_smallest_gap() -> None:
    ledger = SmSlotLedger({"a": h100()})
    leases = [ledger.lease_slots("a", str(at), share) for at, share in enumerate((4, 1, 2, 1, 2))]
    ledger.release_owner("0")
    ledger.release_owner("2")
    assert ledger.free("a") == [leases[0].units, leases[2].units]
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


def test_an_owner_that_died_holds_nothing() -> None:
    ledger = SmSlotLedger({"a": SmSlots(84, sm_granularity((8, 6)))})
    first, kept = ledger.lease_slots("a", "dead", 2), ledger.lease_slots("a", "alive", 2)
    second = ledger.lease_slots("a", "dead", 1)
    assert ledger.keep_owners(["alive"]) == [first, second]
    assert ledger.leases() == [kept]
    assert ledger.release_owner("dead") == []
    assert ledger.release_owner("alive") == [kept]
    assert ledger.free("a") == [range(21)]


def test_a_new_ledger_takes_in_what_an_earlier_one_has_leased() -> None:
    earlier = SmSlotLedger({"a": h100()})
    gone, kept = earlier.lease_slots("a", "gone", 3), earlier.lease_slots("a", "kept", 3)
    ledger = SmSlotLedger({"a": h100()}, first_id=100)
    ledger.restore(kept)
    ledger.restore(kept)  # Said twice, once meant.
    assert ledger.leases() == [kept]
    # No other owner gets restored units, and one that comes too late has to lease anew.
    new = ledger.lease_slots("a", "new", 3)
    assert (new.id, new.units) == (100, range(5))
    with pytest.raises(NoFreeSms, match="units 0 to 4 are not free, since new has 0 to 4"):
        ledger.restore(gone)
    assert ledger.leases() == [kept, new]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda lease: SmLease(7, "a", "x", range(14, 17), 2, 24), ValueError),
        (lambda lease: SmLease(7, "a", "x", range(0), 0, 0), ValueError),
        (lambda lease: SmLease(7, "b", "x", range(2), 1, 16), KeyError),
        (lambda lease: SmLease(lease.id, "a", "x", range(4, 6), 1, 16), ValueError),
    ],
)
def test_a_lease_that_no_ledger_gave_is_not_taken_in(
    spoil: Callable[[SmLease], SmLease], error: type[Exception]
) -> None:
    ledger = SmSlotLedger({"a": h100()})
    lease = ledger.lease_slots("a", "x", 1)
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
            free = self.ledger.free(uuid)
            assert all(free)
            units += [unit for run in free for unit in run]
            assert sorted(units) == list(range(gpu.split.units))
            for lease in here:
                assert lease.sms == gpu.split.sms_of(lease.units)
                assert gpu.sizes[lease.slots] <= lease.sms
                assert lease.slots == SM_SLOTS or gpu.sizes[lease.slots + 1] > lease.sms


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
