"""New prompts wait until memories have room for them, and turns go first whose KV is there."""

import pytest

from conserve.admission import Admission, Admitted, Levels, Ticket
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.pausing.cache import WorkingSet
from conserve.recognition import Chain
from tests.unit.conserve.conversations.scene import Turn, start, the
from tests.unit.conserve.pausing.scene import NOW_S, a_parking_table, memory_of, parking, paused

TIMEOUT_S = 60.0


def three_at_work(host_tokens: int = 2000) -> tuple[ConversationTable, Admission]:
    """One is on the decoder, two have made room for it, and a fourth runs: 1900 tokens."""
    table = a_parking_table(host_tokens=host_tokens)
    for name in "abc":
        assert parking(table, name, 600)
    assert paused(table) == {"a", "b"}
    start(table, "runs", 100)
    return table, Admission(table, 64, TIMEOUT_S, Levels(rise_s=TIMEOUT_S / 6))


def names(answers: list[Admitted]) -> list[str]:
    return [one.history.id for one in answers]


def test_who_rests_leaves_and_who_is_added_again_stays() -> None:
    working = WorkingSet()
    working.add("runs", 10)
    working.rest("rests", 20, 5.0)
    working.rest("back", 30, 5.0)
    working.add("back", 35)
    working.rest("later", 40, 5.0)
    working.rest("later", 45, 7.0)
    assert working.tokens == 10 + 20 + 35 + 45
    working.advance(5.0)
    assert working.tokens == 10 + 35 + 45
    for name in ("runs", "later", "unknown"):
        working.remove(name)
    working.advance(100.0)
    assert working.tokens == 35


@pytest.mark.parametrize(("host_tokens", "waits"), [(2000, True), (3000, False), (0, False)])
def test_a_new_prompt_waits_until_memories_can_keep_it_too(host_tokens: int, waits: bool) -> None:
    table, admission = three_at_work()
    memory_of(table).set_host_tokens(host_tokens)
    table.release("c")
    assert parking(table, "c", 600) == (host_tokens > 0)
    table.release("a" if host_tokens == 0 else "none")
    answer = admission.enter("new", 300, NOW_S + 1)
    assert isinstance(answer, Ticket) == waits
    if waits:
        assert admission.ahead("new", NOW_S + 1) == (0, "window")
        assert admission.admit(NOW_S + 2) == []
        table.release("b")
        assert names(admission.admit(NOW_S + 3)) == ["new"]


def test_while_no_turn_runs_none_waits_for_memories() -> None:
    table, admission = three_at_work()
    assert isinstance(admission.enter("new", 300, NOW_S + 1), Ticket)
    table.release("runs")
    assert names(admission.admit(NOW_S + 2)) == ["new"]


def test_who_did_not_come_back_in_time_is_not_waited_for() -> None:
    table, admission = three_at_work()
    assert isinstance(admission.enter("new", 300, NOW_S + 1), Ticket)
    admission.observe(NOW_S + 61)
    assert memory_of(table).working.tokens == 100
    assert names(admission.admit(NOW_S + 61)) == ["new"]


def test_what_waits_for_memories_holds_up_nobody_else() -> None:
    _, admission = three_at_work()
    assert isinstance(admission.enter("new", 300, NOW_S + 1), Ticket)
    # It is aged by now.
    assert isinstance(admission.enter("a", 620, NOW_S + 15), Admitted)


def test_what_a_memory_has_evicted_since_it_came_waits_like_what_none_has() -> None:
    table, admission = three_at_work()
    assert table.begin("c", NOW_S + 1) is not None
    assert isinstance(admission.enter("a", 620, NOW_S + 2), Ticket)
    assert admission.ahead("a", NOW_S + 2) == (0, "room")
    memory_of(table).set_host_tokens(1300)
    assert admission.ahead("a", NOW_S + 3) == (0, "window")


def test_what_a_memory_has_goes_before_what_none_has() -> None:
    table, admission = three_at_work()
    assert table.begin("c", NOW_S + 1) is not None
    assert isinstance(admission.enter("new", 300, NOW_S + 1), Ticket)
    assert isinstance(admission.enter("a", 620, NOW_S + 2), Ticket)
    assert admission.ahead("a", NOW_S + 2) == (0, "room")
    assert admission.ahead("new", NOW_S + 2) == (1, "window")
    # It is worked on as long as its turn waits, and not when its client has left.
    assert memory_of(table).free_tokens(NOW_S + 70) == 2000 - 620 - 600 - 100
    admission.leave("a")
    assert memory_of(table).free_tokens(NOW_S + 70) == 2000 - 600 - 100


@pytest.mark.parametrize(("name", "tokens", "goes"), [("new", 200, False), ("b", 900, True)])
def test_in_the_end_only_what_has_begun_is_let_in(name: str, tokens: int, goes: bool) -> None:
    """A new conversation can be refused; one that has begun has more to lose."""
    table, admission = three_at_work()
    memory = memory_of(table)
    memory.set_host_tokens(0)
    memory.set_host_tokens(100)
    for other in ("a", "c"):
        memory.working.add(other, 600)
    # The decoder has room for 300 tokens, and its engine 400 tokens of b.
    assert isinstance(admission.enter(name, tokens, NOW_S + 1), Ticket)
    assert admission.ahead(name, NOW_S + 1) == (0, "window")
    assert names(admission.admit(NOW_S + 52)) == ([name] if goes else [])


def test_what_was_lost_with_its_decoder_is_not_worked_on() -> None:
    table, _ = three_at_work()
    assert table.begin("c", NOW_S + 1) is not None
    free_tokens = memory_of(table).free_tokens(NOW_S + 1)
    table.add_decoder("d2", 1000)
    table.remove_engine("d1")
    assert the(table, "c").home is None
    assert memory_of(table).free_tokens(NOW_S + 1) == free_tokens + 600 + 100


def test_a_beginning_that_all_share_does_not_count_for_each() -> None:
    """Agents have system prompts of thousands of tokens in common."""
    # The larger memory counts, which is the decoder's.
    table = a_parking_table(host_tokens=500)
    admission = Admission(table, 64, TIMEOUT_S)
    memory_of(table).working.add("others", 300)
    for number in range(5):
        began = Chain(bytes([number]) * 16, b"system".ljust(16), (), ends_with_root=True)
        answer = admission.enter(f"c{number}", 600, NOW_S, opening=Opening(began, 500))
        assert isinstance(answer, Admitted)
    assert memory_of(table).free_tokens(NOW_S) == 1000 - 300 - 5 * 100
    Turn.last(table, "c4").advance(table, 640, now_s=NOW_S)
    assert memory_of(table).free_tokens(NOW_S) == 1000 - 300 - 4 * 100 - 150
