"""Environments' holders: a model, crashes at any entry, quotas, and when an environment is
removed.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve import identity
from conserve_tools.ledger import MOST_OF_CONVERSATION, Conflict, Ledger, QuotaExceeded, Quotas
from conserve_tools.spec import Spec
from deployments.messages import Standing

QUOTAS = Quotas(most=4, most_of_tenant=3, unclaimed_s=60.0)
LIVE = Standing("live")
CONVERSATIONS = ["a", "b", "one\tx", "one\ty", "two\tx"]


class Killed(BaseException):
    pass


def may_be_killed(step: Callable[..., None]) -> Callable[..., None]:
    """Have a step of `Life` end where its process is killed, or where a quota is used up."""

    @functools.wraps(step)
    def carried_out(life: "Life", **given: Any) -> None:
        try:
            step(life, **given)
        except Killed:
            life.kill_at = None
            life.is_killed_between()
        except QuotaExceeded:
            assert len(life.ledger) >= 3
        except Conflict:
            pass

    return carried_out


class Life(RuleBasedStateMachine):
    """A ledger whose process is killed at any entry, before or after that is on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self.kill_at: tuple[int, bool] | None = None
        self.now_s, self.table = 0.0, 1
        self.live: set[str] = set()
        self.ledger = Ledger(QUOTAS, self.record)

    def record(self, entry: dict[str, Any]) -> None:
        if self.kill_at is not None:
            left, written = self.kill_at
            if left == 0:
                if written:
                    self.entries.append(entry)
                raise Killed
            self.kill_at = (left - 1, written)
        self.entries.append(entry)

    @rule(left=st.integers(0, 3), written=st.booleans())
    def will_be_killed(self, left: int, written: bool) -> None:
        self.kill_at = (left, written)

    @rule()
    def is_killed_between(self) -> None:
        self.ledger = Ledger(QUOTAS, self.record)
        self.ledger.recover(self.entries, self.now_s)

    @rule()
    def journal_is_rewritten(self) -> None:
        before = state(self.ledger)
        self.entries = self.ledger.snapshot()
        fresh = Ledger(QUOTAS)
        fresh.recover(self.entries, self.now_s)
        assert state(fresh) == {
            number: (*rest, "declared" if how == "preparing" else how)
            for number, (*rest, how) in before.items()
        }

    @rule(
        conversation=st.sampled_from(CONVERSATIONS),
        name=st.sampled_from(["main", "db"]),
        shared=st.booleans(),
    )
    @may_be_killed
    def declares(self, conversation: str, name: str, shared: bool) -> None:
        found = self.ledger.declare(conversation, Spec(name=name, shared=shared), self.now_s)
        assert conversation in found.holders
        assert found.tenant == identity.tenant_of(conversation)

    @rule(conversation=st.sampled_from(CONVERSATIONS), name=st.sampled_from(["main", "db"]))
    @may_be_killed
    def lets_go(self, conversation: str, name: str) -> None:
        self.ledger.let_go(conversation, name)

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def begins(self, conversation: str) -> None:
        self.live.add(conversation)

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def ends(self, conversation: str) -> None:
        self.live.discard(conversation)

    @rule()
    def table_is_another(self) -> None:
        self.table += 1

    @rule(after_s=st.sampled_from([1.0, 61.0]))
    def looks(self, after_s: float) -> None:
        self.now_s += after_s
        before = {one.number: set(one.holders) for one in self.ledger if one.state != "removing"}
        self.is_observed()
        after = {one.number: set(one.holders) for one in self.ledger}
        # No live conversation loses anything.
        assert all(holders & self.live <= after[number] for number, holders in before.items())

    @may_be_killed
    def is_observed(self) -> None:
        self.ledger.observe(self.table, dict.fromkeys(self.live, LIVE), self.now_s)

    @rule()
    @may_be_killed
    def works(self) -> None:
        for one in self.ledger.to_prepare(near=1, most=2):
            self.ledger.preparing(one.number)

    @rule(works=st.booleans())
    @may_be_killed
    def has_prepared(self, works: bool) -> None:
        for one in list(self.ledger):
            if one.state == "preparing" and works:
                self.ledger.ready(one.number, [1])
            elif one.state == "preparing":
                self.ledger.failed(one.number, "setup: exit code 1")

    @rule()
    @may_be_killed
    def removes(self) -> None:
        for one in self.ledger.to_remove():
            assert not one.holders
            if one.state != "removing":
                self.ledger.removing(one.number)
            self.ledger.removed(one.number)

    @precondition(lambda self: len(self.ledger))
    @rule()
    def all_end(self) -> None:
        """Nothing is left once all have ended."""
        self.kill_at = None
        self.live.clear()
        self.now_s += 1
        self.ledger.observe(self.table, {}, self.now_s)
        self.now_s += 61
        self.ledger.observe(self.table, {}, self.now_s)
        self.has_prepared(works=True)
        self.removes()
        assert len(self.ledger) == 0
        assert not self.ledger.conversations()

    @invariant()
    def accounts_agree(self) -> None:
        every = list(self.ledger)
        slots = [one.slot for one in every]
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < QUOTAS.most for slot in slots)
        assert sum(one.tenant == "one" for one in every) <= QUOTAS.most_of_tenant
        for one in every:
            for conversation in one.holders:
                assert self.ledger.find(conversation, one.spec.name) is one
                assert identity.tenant_of(conversation) == one.tenant
            assert one.spec.shared or len(one.holders) <= 1
        held = [one for id in self.ledger.conversations() for one in self.ledger.of(id)]
        assert len(held) == sum(len(one.holders) for one in every)
        shared = [(one.tenant, one.spec.name) for one in every if one.spec.shared and one.holders]
        assert len(shared) == len(set(shared))


def state(ledger: Ledger) -> dict[int, Any]:
    return {
        one.number: (
            one.slot, one.tenant, one.spec, one.ports, one.error,
            {id: holder.seen_by for id, holder in one.holders.items()}, one.state,
        )
        for one in ledger
    }  # fmt: skip


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def ledger(**changes: Any) -> Ledger:
    quotas = {"most": 9, "most_of_tenant": 9, "unclaimed_s": 60.0}
    return Ledger(Quotas(**(quotas | changes)))


def near(one: Ledger, places: int = 1, most: int = 9) -> list[str]:
    return [id for made in one.to_prepare(places, most) for id in made.holders]


def test_what_is_needed_soon_is_prepared_first() -> None:
    line = ledger()
    for name in ("far", "second", "head", "bound", "unknown"):
        line.declare(name, Spec(), 0.0)
    places = {"head": 0, "second": 1, "far": 2}
    standings = {name: Standing("waiting", place) for name, place in places.items()}
    line.observe(1, standings | {"bound": LIVE}, 1.0)
    *soonest, last = near(line, places=2)
    assert ({*soonest}, last) == ({"head", "bound"}, "second")
    assert near(line, places=0) == ["bound"]
    # Those that a command waits for come before all that may be needed.
    line.used("unknown", "main", 1.0)
    assert near(line, places=1)[0] == "unknown"
    assert len(near(line, most=2)) == 2
    for one in line.to_prepare(1, 2):
        line.preparing(one.number)
    assert near(line, most=2) == []


def test_an_end_is_told_from_a_table_that_was_lost() -> None:
    line = ledger()
    for name in ("ended", "lost", "back"):
        line.declare(name, Spec(), 0.0)
    line.observe(1, {"ended": LIVE, "lost": LIVE, "back": LIVE}, 1.0)
    line.observe(1, {"lost": LIVE, "back": LIVE}, 2.0)
    assert set(line.conversations()) == {"lost", "back"}
    line.observe(2, {}, 3.0)
    assert set(line.conversations()) == {"lost", "back"}
    line.used("back", "main", 50.0)
    line.observe(2, {}, 100.0)
    assert set(line.conversations()) == {"back"}
    line.observe(2, {"back": LIVE}, 101.0)
    line.observe(2, {}, 102.0)
    assert not line.conversations()


def test_one_that_never_begins_has_its_time() -> None:
    line = ledger()
    line.declare("never", Spec(), 0.0)
    line.observe(1, {}, 60.0)
    assert not line.to_remove()
    line.observe(1, {}, 60.5)
    assert len(line.to_remove()) == 1


def test_a_shared_one_goes_with_its_last_holder() -> None:
    line = ledger()
    made = [line.declare(name, Spec(shared=True), 0.0) for name in ("one\ta", "one\tb")]
    line.let_go("one\ta", "main")
    assert not line.to_remove()
    line.let_go("one\tb", "main")
    assert line.to_remove() == [made[0]]


def test_quotas_say_which_setting() -> None:
    for quota in ({"most": 2}, {"most_of_tenant": 2}):
        line = ledger(**quota)
        line.declare("t\ta", Spec(), 0.0)
        line.declare("t\tb", Spec(), 0.0)
        with pytest.raises(QuotaExceeded) as error:
            line.declare("t\tc", Spec(), 0.0)
        assert error.value.setting == "most"
        assert len(line) == 2
    line = ledger()
    for number in range(MOST_OF_CONVERSATION):
        line.declare("a", Spec(name=f"n{number}"), 0.0)
    with pytest.raises(QuotaExceeded, match="the conversation has 8"):
        line.declare("a", Spec(), 0.0)


def test_what_cannot_be_recorded_does_not_count() -> None:
    def full(entry: dict[str, Any]) -> None:
        raise OSError("no space left on device")

    line = Ledger(QUOTAS, full)
    with pytest.raises(OSError, match="no space"):
        line.declare("a", Spec(), 0.0)
    assert len(line) == 0
