"""SM slots: their arithmetic, and a ledger that never leases what it has not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero.sm_slots import (
    SM_SLOTS,
    NoFreeSms,
    SmGranularity,
    SmSlotLedger,
    SmSlots,
    UnknownSmLease,
    sm_granularity,
)

# A busy machine is no failure.
without_deadline = settings(deadline=None)

CAPABILITIES = st.sampled_from([(6, 1), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
GPUS = st.builds(
    lambda sms, capability: SmSlots(sms, sm_granularity(capability)),
    st.integers(1, 200),
    CAPABILITIES,
)


@without_deadline
@given(GPUS)
def test_a_slot_and_its_complement_are_all_sms(gpu: SmSlots) -> None:
    for slot in range(SM_SLOTS + 1):
        assert gpu.sizes[slot] + gpu.complement(slot) == gpu.sm_count
    assert (gpu.sizes[0], gpu.sizes[SM_SLOTS]) == (0, gpu.sm_count)


@without_deadline
@given(GPUS)
def test_a_slot_has_at_least_its_tenths_in_sizes_that_are_allowed(gpu: SmSlots) -> None:
    for slot in range(1, SM_SLOTS):
        size = gpu.sizes[slot]
        assert size * SM_SLOTS >= gpu.sm_count * slot
        if size < gpu.sm_count:
            assert size % gpu.allowed.multiple == 0
            assert size >= gpu.allowed.minimum
            # Rounded up no further than it must be.
            assert (
                size - gpu.allowed.multiple
            ) * SM_SLOTS < gpu.sm_count * slot or size - gpu.allowed.multiple < gpu.allowed.minimum
    assert list(gpu.sizes) == sorted(gpu.sizes)


@without_deadline
@given(GPUS, st.data())
def test_the_smallest_slot_that_is_enough(gpu: SmSlots, data: st.DataObject) -> None:
    asked = data.draw(st.integers(1, gpu.sm_count))
    more = data.draw(st.integers(asked, gpu.sm_count))
    slot = gpu.smallest(asked)
    assert gpu.sizes[slot] >= asked > gpu.sizes[slot - 1]
    assert gpu.sizes[gpu.smallest(more)] >= gpu.sizes[slot]


def test_the_papers_example() -> None:
    """AgentServe §III-C: a target of 37 % selects the 40 % context. On its GPUs: 64, 128 SMs."""
    for sms, capability in ((64, (8, 6)), (128, (12, 0))):
        gpu = SmSlots(sms, sm_granularity(capability))
        assert gpu.smallest(gpu.sms(0.37)) == 4


def test_sizes_of_an_h100() -> None:
    gpu = SmSlots(132, sm_granularity((9, 0)))
    assert gpu.sizes == (0, 16, 32, 40, 56, 72, 80, 96, 112, 120, 132)


def test_shares_are_rounded_up() -> None:
    gpu = SmSlots(10, SmGranularity(1, 1))
    assert [gpu.sms(share) for share in (0, 0.05, 0.3, 0.31, 1)] == [1, 1, 3, 4, 10]
    with pytest.raises(ValueError, match="not between"):
        gpu.sms(1.1)


@pytest.mark.parametrize("asked", [0, 85])
def test_what_no_gpu_has_is_refused(asked: int) -> None:
    gpu = SmSlots(84, sm_granularity((8, 6)))
    with pytest.raises(ValueError, match=f"asked for {asked} of 84"):
        SmSlotLedger({"a": gpu}).lease("a", "x", asked)


def test_ten_tenths_are_all_sms_whatever_the_rounding() -> None:
    ledger = SmSlotLedger({"h100": SmSlots(132, sm_granularity((9, 0)))})
    sizes = [ledger.lease("h100", "x", asked).sms for asked in (40, 40, 52)]
    assert sizes == [40, 40, 52]  # The last is what is left: no multiple of 8.
    assert ledger.free("h100") == (0, 0)
    with pytest.raises(NoFreeSms, match="0 of 132"):
        ledger.lease("h100", "y", 1)


def test_rebinding_keeps_the_lease_and_refuses_what_others_have() -> None:
    ledger = SmSlotLedger({"a": SmSlots(100, SmGranularity(2, 2))})
    mine, other = ledger.lease("a", "me", 40), ledger.lease("a", "other", 30)
    assert ledger.rebind(mine.id, 61).sms == 70
    assert ledger.rebind(mine.id, 11).sms == 20
    with pytest.raises(NoFreeSms):
        ledger.rebind(mine.id, 71)
    assert ledger.get(mine.id).sms == 20
    assert ledger.get(other.id) == other
    assert ledger.free("a") == (5, 50)


def test_the_border_between_decoding_and_prefill_moves() -> None:
    """What one gives the other gets, and a third's lease is not touched."""
    ledger = SmSlotLedger({"a": SmSlots(64, sm_granularity((8, 6)))})
    decode, prefill = ledger.lease("a", "engine", 26), ledger.lease("a", "engine", 26)
    third = ledger.lease("a", "third", 6)
    together = decode.sms + prefill.sms
    for asked in (1, 7, 24, 26, 40, together):
        decode, prefill = ledger.split(decode.id, prefill.id, asked)
        assert decode.sms >= asked
        assert decode.sms + prefill.sms == together
        assert ledger.get(third.id) == third
    assert (prefill.slots, prefill.sms) == (0, 0)
    decode, prefill = ledger.split(decode.id, prefill.id, 8)
    assert prefill.sms == together - 8
    with pytest.raises(NoFreeSms):
        ledger.split(decode.id, prefill.id, together + 1)
    with pytest.raises(ValueError, match="two leases"):
        ledger.split(decode.id, decode.id, 8)


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
    assert ledger.free("a") == (SM_SLOTS, 84)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of calls, by any owners, on GPUs of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus = {
            "h100": SmSlots(132, sm_granularity((9, 0))),
            "a40": SmSlots(84, sm_granularity((8, 6))),
            "small": SmSlots(10, sm_granularity((9, 0))),
        }
        self.ledger = SmSlotLedger(self.gpus)

    @rule(
        gpu=st.sampled_from(["h100", "a40", "small"]), owner=st.sampled_from("abc"), data=st.data()
    )
    def lease(self, gpu: str, owner: str, data: st.DataObject) -> None:
        asked = data.draw(st.integers(1, self.gpus[gpu].sm_count))
        slots, sms = self.ledger.free(gpu)
        try:
            assert self.ledger.lease(gpu, owner, asked).sms >= asked
        except NoFreeSms:
            assert sms < max(asked, self.gpus[gpu].allowed.minimum) or not slots
            assert self.ledger.free(gpu) == (slots, sms)

    @precondition(lambda self: self.ledger.leases())
    @rule(data=st.data())
    def rebind(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.ledger.leases()))
        asked = data.draw(st.integers(1, self.gpus[old.gpu].sm_count))
        try:
            new = self.ledger.rebind(old.id, asked)
        except NoFreeSms:
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
        free = self.ledger.free(decode.gpu)
        try:
            new, rest = self.ledger.split(decode.id, prefill.id, asked)
        except NoFreeSms:
            assert self.ledger.get(decode.id) == decode
            assert self.ledger.get(prefill.id) == prefill
        else:
            assert new.sms >= asked
            assert new.sms + rest.sms == decode.sms + prefill.sms
        assert self.ledger.free(decode.gpu) == free

    @precondition(lambda self: self.ledger.leases())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ledger.leases()))
        slots, sms = self.ledger.free(lease.gpu)
        self.ledger.release(lease.id)
        assert self.ledger.free(lease.gpu) == (slots + lease.slots, sms + lease.sms)

    @rule(owner=st.sampled_from("abc"))
    def owner_dies(self, owner: str) -> None:
        self.ledger.release_owner(owner)
        assert all(lease.owner != owner for lease in self.ledger.leases())

    @invariant()
    def nothing_is_leased_twice(self) -> None:
        for uuid, gpu in self.gpus.items():
            here = [lease for lease in self.ledger.leases() if lease.gpu == uuid]
            slots, sms = self.ledger.free(uuid)
            assert 0 <= slots == SM_SLOTS - sum(lease.slots for lease in here)
            assert 0 <= sms == gpu.sm_count - sum(lease.sms for lease in here)
            if slots == 0:
                assert sms == 0


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
