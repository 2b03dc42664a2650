"""The queue's order: by attained service, and by arrival."""

from conserve.admission import Admission, Admitted, FirstCome, Levels, Ticket
from conserve.admission.admission import attained_service
from conserve.conversations import ConversationTable
from conserve.histories.prefixes import Prefix
from conserve.history import History
from conserve.pausing import Pausing
from conserve.placement import PlacementPolicy
from conserve.policies import room_policies
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import a_table


def an_admission(capacity: int = 1000, rise_s: float = 10.0) -> tuple[ConversationTable, Admission]:
    table = a_table(decoders=1, capacity_tokens=capacity)
    return table, Admission(table, 64, 60, Levels(first_tokens=500, rise_s=rise_s))


def names(admitted: list[Admitted]) -> list[str]:
    return [one.history.id for one in admitted]


def test_who_has_been_served_less_goes_first() -> None:
    table, admission = an_admission()
    began = admission.enter("worked", 600, 0.0)
    assert isinstance(began, Admitted)
    table.advance(began.turn, "d1", TurnStats(600, 100, 0, 0), (), 1.0)
    # Its decoder is lost, and comes back empty.
    table.remove_engine("d1")
    table.add_decoder("d1", 1000)
    assert isinstance(admission.enter("fills", 900, 2.0), Admitted)
    back = admission.enter("worked", 710, 3.0)
    assert isinstance(back, Ticket)
    assert back.served_tokens == 700
    new = admission.enter("new", 700, 4.0)
    assert isinstance(new, Ticket)
    assert new.served_tokens == 0
    assert admission.ahead("new", 4.0) == (0, "room")
    assert admission.ahead("worked", 4.0) == (1, "room")
    table.release("fills")
    assert names(admission.admit(5.0)) == ["new"]


def test_all_histories_of_a_conversation_count() -> None:
    table, admission = an_admission(capacity=5000)
    for id in ("c", "c\t\t1"):
        one = admission.enter(id, 1000, 0.0)
        assert isinstance(one, Admitted)
        table.advance(one.turn, "d1", TurnStats(1000, 50, 0, 0), (), 1.0)
    assert isinstance(admission.enter("fills", 2900, 2.0), Admitted)
    third = admission.enter("c\t\t2", 1000, 3.0)
    assert isinstance(third, Ticket)
    assert third.served_tokens == 2100


def test_what_others_begin_with_too_is_no_service_of_its_own() -> None:
    history = History("c", 1, 0.0, 0.0, base=Prefix(800, 2, None))
    history.last_turn = TurnStats(900, 10, 0, 0)
    assert attained_service([history]) == 110


def test_who_fits_goes_before_one_who_does_not_for_a_bounded_time() -> None:
    table, admission = an_admission()
    assert isinstance(admission.enter("holds", 700, 0.0), Admitted)
    assert isinstance(admission.enter("large", 900, 0.0), Ticket)
    # It does not have to wait for another to go, either.
    assert isinstance(admission.enter("small", 100, 1.0), Admitted)
    assert isinstance(admission.enter("too large", 250, 2.0), Ticket)
    table.release("small")
    assert names(admission.admit(9.0)) == ["too large"]
    table.release("too large")
    # From now on room is kept for the large one.
    assert isinstance(admission.enter("late", 100, 10.0), Ticket)
    assert admission.ahead("late", 10.0) == (1, "order")
    assert admission.admit(10.0) == []
    table.release("holds")
    assert names(admission.admit(11.0)) == ["large", "late"]


def test_by_default_and_without_pausing_nobody_overtakes() -> None:
    assert isinstance(room_policies(300.0, pauses=False).order, FirstCome)
    assert isinstance(room_policies(300.0, pauses=True).order, Levels)
    table = a_table(decoders=1)
    admission = Admission(table, 8, 60, FirstCome())
    admission.enter("holds", 700, 0.0)
    for number, tokens in enumerate((900, 10, 10)):
        assert isinstance(admission.enter(f"c{number}", tokens, 1.0), Ticket)
    ahead = [admission.ahead(f"c{number}", 1e6) for number in range(3)]
    assert ahead == [(0, "room"), (1, "order"), (2, "order")]
    assert admission.admit(1e6) == []


class _Full(PlacementPolicy):
    """A policy that places no history, and counts the attempts."""

    tried = 0

    def place(self, *_: object) -> None:
        self.tried += 1


def test_so_many_are_tried_in_vain_and_no_more() -> None:
    policy = _Full()
    table = a_table(decoders=1, policy=policy, pausing=Pausing())
    admission = Admission(table, 64, 60, Levels())
    for number in range(40):
        assert isinstance(admission.enter(f"c{number}", 900, 0.0), Ticket)
    policy.tried = 0
    assert admission.admit(1.0) == []
    assert policy.tried == 8
    # Aged, the first holds up the others.
    assert admission.admit(11.0) == []
    assert policy.tried == 9
