"""Conversations that others began: who began which, who waits for whom, and who is done."""

import random
from operator import ne

import pytest

from conserve.conversations import ConversationTable
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.pausing import Pausing
from conserve.turn import TurnStats
from deployments.table.views import SHOWN_HISTORIES, conversation_view
from tests.unit.conserve.conversations.scene import Turn, a_table, the
from tests.unit.conserve.pausing.scene import paused

NOW_S = 100.0


def begin(
    table: ConversationTable, name: str, parent: str | None = None, tokens: int = 10,
    now_s: float = NOW_S,
) -> Turn:  # fmt: skip
    opening = Opening(hints=Hints(parent=parent))
    if table.begin(name, now_s) is None:
        assert table.bind(name, tokens, now_s, opening=opening) is not None
    return Turn.last(table, name)


def answer(table: ConversationTable, turn: Turn, tool: str | None, now_s: float = NOW_S) -> None:
    stats = TurnStats(the(table, turn.history_id).held_tokens, 0, tool=tool)
    assert table.advance(turn.key, turn.decoder_id, stats, (), now_s)


def test_a_family_is_known_while_its_members_live() -> None:
    table = a_table()
    for child, parent in (("a", "p"), ("b", "p"), ("p", "a"), ("p\t\t1", "b"), ("own", "own")):
        begin(table, child, parent)
    # Two that name each other are both. What later histories name changes nothing.
    assert [table.parents.parent(one) for one in ("a", "p", "own", "none")] == [
        "p",
        "a",
        None,
        None,
    ]
    assert [[*table.parents.children(one)] for one in ("a", "p", "own")] == [["p"], ["a", "b"], []]
    table.release("p")
    assert table.parents.parent("p") == "a"
    for one in ("p\t\t1", "a"):
        table.release(one)
    assert [table.parents.parent(one) for one in ("a", "b", "p")] == [None, "p", None]
    assert [*table.parents.children("p")] == ["b"]
    table.release("b")
    assert not table.parents


def test_who_waits_for_its_children_gives_up_its_room() -> None:
    table = a_table(decoders=1, prefillers=0, pausing=Pausing())
    parent = begin(table, "p", tokens=400)
    answer(table, parent, "task")
    idle = begin(table, "idle", tokens=300)
    answer(table, idle, "read")
    child = begin(table, "c", "p", tokens=200)
    assert table.bind("new", 300, NOW_S) is not None
    assert paused(table) == {"p"}
    assert not table.parents.waits(the(table, "c"))
    answer(table, child, "read")
    assert table.parents.waits(the(table, "p"))
    answer(table, begin(table, "c"), None)
    assert not table.parents.waits(the(table, "p"))


def test_a_child_whose_answer_is_taken_up_goes_first() -> None:
    table = a_table(decoders=1, prefillers=0, pausing=Pausing())
    answer(table, begin(table, "p", tokens=100), "task")
    for name in ("works", "done"):
        answer(table, begin(table, name, "p", tokens=300), "read" if name == "works" else None)
    assert not table.parents.is_taken_up(the(table, "done"))
    begin(table, "p", now_s=NOW_S + 1)
    assert table.parents.is_taken_up(the(table, "done"))
    assert not table.parents.is_taken_up(the(table, "works"))
    assert table.bind("new", 400, NOW_S + 1) is not None
    assert paused(table) == {"done"}


def test_the_last_child_s_end_tells_whom_to_bring_back() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    answer(table, begin(table, "p"), "task")
    children = [begin(table, name, "p") for name in ("a", "b")]
    done = []
    for child, tool in zip(children, (None, "read"), strict=True):
        answer(table, child, tool)
        done.append(table.parents.done(the(table, child.history_id)))
    assert done == [None, None]
    answer(table, begin(table, "b"), None)
    assert table.parents.done(the(table, "b")) is the(table, "p")
    begin(table, "p")
    assert table.parents.done(the(table, "b")) is None
    assert table.parents.done(the(table, "p")) is None


@pytest.mark.parametrize("lie", ["t\tnone", "t\tothers", "t\tliar0", "t\tliar3"])
def test_lies_change_nobody_else_s_turns(lie: str) -> None:
    """A parent that does not exist, another tenant's id under the own one, and the own ones."""
    liars = {f"t\tliar{number}" for number in range(4)}

    def play(parent: str | None) -> list[set[str]]:
        table, chance, seen = a_table(1, pausing=Pausing()), random.Random(1), list[set[str]]()
        for now_s in range(400):
            name = chance.choice([*sorted(liars), "others", "u\tothers", "u\tmore"])
            opening = Opening(hints=Hints(parent=parent if name in liars else None))
            tokens = chance.randrange(100, 400)
            if table.begin(name, now_s) or table.bind(name, tokens, now_s, opening=opening):
                answer(table, Turn.last(table, name), chance.choice([None, "read"]), now_s)
            seen.append({one.id for one in table.live() if one.home} - liars)
        return seen

    # A liar's history that claims to wait for another gives up its room before those of others.
    first = next((pair for pair in zip(play(lie), play(None), strict=True) if ne(*pair)), None)
    assert first is None or (lie in liars and first[0] > first[1])


def test_of_a_thousand_children_few_are_looked_at() -> None:
    table = a_table(decoders=1, capacity_tokens=100_000, pausing=Pausing())
    answer(table, begin(table, "p"), "task")
    for number in range(1000):
        answer(table, begin(table, f"c{number}", "p"), None)
    working = begin(table, "c63", now_s=NOW_S + 1)
    assert table.parents.waits(the(table, "p"))
    answer(table, working, None, NOW_S + 1)
    begin(table, "c64", now_s=NOW_S + 2)
    assert not table.parents.waits(the(table, "p"))
    shown = conversation_view("p", table, NOW_S, {})
    assert shown is not None
    assert (len(shown.children), shown.children_total) == (SHOWN_HISTORIES, 1000)
