"""Scenes of agents and their histories, which are placed warm, together, or spread."""

import copy

import pytest

from conserve.conversations import ConversationTable
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.placement import ConversationPlacement, Placement
from conserve.recognition import Chain, chain_of
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import (
    IDLE_S,
    Turn,
    a_table,
    binding,
    chain,
    held,
    stats,
    the,
)

NAME = "session"


def ends(*names: str) -> list[bytes]:
    return [name.encode() * (16 // len(name)) for name in names]


def bound(
    table: ConversationTable, history_id: str, tokens: int, chain: Chain, system_tokens: int = 0
) -> Placement:
    placement = table.bind(history_id, tokens, 0, opening=Opening(chain, system_tokens))
    assert placement is not None
    return placement


def a_history(table: ConversationTable, history_id: str, lengths: list[int], name: str) -> None:
    """A history whose turns end at these lengths, each with its own tail."""
    bound(table, history_id, lengths[0] - 10, chain(name))
    for number, length in enumerate(lengths):
        if number:
            assert table.begin(history_id, 0) is not None
        turn = Turn.last(table, history_id)
        found = TurnStats(length - 10, 10, lengths[number - 1] if number else 0, 0)
        assert table.advance(turn.key, turn.decoder_id, found, tuple(ends(f"{number:04}")), 0)


def test_who_goes_back_starts_warm_and_counts_what_it_adds() -> None:
    table = a_table(capacity_tokens=10_000)
    a_history(table, NAME, [1000, 2000, 3000], "x")
    home = binding(table, NAME)
    assert home is not None
    forked = bound(table, f"{NAME}\t\t1", 2300, chain("x", ends("0001", "0000")))
    assert forked == Placement(home, None)
    assert held(table)[home] == (3000 + 300, 2)
    # A title beside it, with nothing in common, goes to where there is most room, by a prefiller.
    title = bound(table, f"{NAME}\t\t2", 400, chain("title"))
    assert title.decoder_id != home
    assert title.prefiller_id == "p1"


def test_most_of_a_prompt_is_to_be_there() -> None:
    table = a_table(capacity_tokens=10_000)
    a_history(table, NAME, [1000, 2000], "x")
    far = bound(table, f"{NAME}\t\t1", 5000, chain("x", ends("0001", "0000")))
    assert far.prefiller_id == "p1"


def test_no_prompt_starts_warm_on_a_decoder_that_is_much_fuller() -> None:
    table = a_table(capacity_tokens=10_000)
    a_history(table, NAME, [1000, 5100], "x")
    placed = bound(table, f"{NAME}\t\t1", 5200, chain("x", ends("0001", "0000")))
    assert placed.decoder_id != binding(table, NAME)
    assert placed.prefiller_id == "p1"


def test_equal_prompts_of_one_conversation_keep_together_and_others_are_spread() -> None:
    table = a_table(capacity_tokens=10_000)
    first = bound(table, NAME, 1000, chain("x"))
    # What is promised is not there yet: a prefiller computes it, and it comes to the same place.
    again = bound(table, f"{NAME}\t\t1", 1000, chain("x"))
    assert again == Placement(first.decoder_id, "p1")
    assert held(table)[first.decoder_id] == (1000, 2)
    other = bound(table, "other", 1000, chain("x"))
    assert other.decoder_id != first.decoder_id


@pytest.mark.parametrize("named", [True, False])
def test_a_compacted_conversation_does_not_wait_for_itself(named: bool) -> None:
    table = a_table(decoders=1, capacity_tokens=5000)
    own = NAME if named else "conv-" + "0" * 24
    a_history(table, own, [1000, 4500], "x")
    bound(table, "idle", 300, chain("idle"))
    Turn.last(table, "idle").advance(table, 300)
    compacted = f"{NAME}\t\t1" if named else "conv-" + "1" * 24
    placement = table.bind(compacted, 2000, 0, opening=Opening(chain("summary")))
    if not named:
        # It is not known that the one has come from the other.
        assert placement is None
        assert table.take_displaced() == []
        return
    assert placement is not None
    assert [one.id for one in table.take_displaced()] == [own]
    assert table.take_displaced() == []
    assert own not in table
    # No other history was paused.
    assert "idle" in table
    assert held(table)["d1"] == (2000 + 310, 2)


def test_what_was_shared_with_the_one_that_goes_is_counted_anew() -> None:
    table = a_table(decoders=1, capacity_tokens=1000)
    bound(table, "other", 490, chain("other"))
    a_history(table, NAME, [350, 400], "x")
    # It fits beside what it shares with it, and not in its place.
    assert table.bind(f"{NAME}\t\t1", 600, 0, opening=Opening(chain("x", ends("0000")))) is None
    assert table.take_displaced() == []
    fork = bound(table, f"{NAME}\t\t1", 505, chain("x", ends("0000")))
    assert [one.id for one in table.take_displaced()] == [NAME]
    assert held(table)[fork.decoder_id] == (490 + 505, 2)


def test_agents_of_one_name_do_not_end_each_other() -> None:
    """If several may have been left behind, none is known to be."""
    table = a_table(decoders=1, capacity_tokens=1000)
    for number in range(2):
        bound(table, f"{NAME}\t\t{number}", 480, chain(f"{number}"))
        Turn.last(table, f"{NAME}\t\t{number}").advance(table, 480)
    assert table.bind(f"{NAME}\t\t2", 400, 0, opening=Opening(chain("2"))) is None
    assert table.take_displaced() == []


def test_what_others_begin_with_is_not_freed() -> None:
    table = a_table(decoders=1, capacity_tokens=3000)
    system = b"s" * 16
    for name in (NAME, "another"):
        own = chain(name)._replace(system=system)
        bound(table, name, 1400, own, system_tokens=1000)
        Turn.last(table, name).advance(table, 1400)
    # 1000 of both, 410 of each.
    assert table.bind(f"{NAME}\t\t1", 1600, 0, opening=Opening(chain("2"))) is None
    assert NAME in table
    bound(table, f"{NAME}\t\t1", 1590, chain("2"))
    assert NAME not in table


def test_a_system_part_that_was_counted_as_longer_is_not_promised() -> None:
    table = a_table(decoders=1, capacity_tokens=3000)
    system = b"s" * 16
    bound(table, "a", 2500, chain("a")._replace(system=system), system_tokens=2003)
    other = Opening(chain("b")._replace(system=system), 2002)
    assert table.bind("b", 2490, 0, opening=other) is None


def test_the_first_of_two_histories_does_not_hide_the_longer() -> None:
    """With a generated id, the turn continues the history whose answer it has."""
    table = a_table(capacity_tokens=10_000)
    given = "conv-" + "0" * 24
    a_history(table, given, [1000], "x")
    bound(table, f"{given}\t\t1", 1100, chain("x", ends("0000")))
    assert Turn.last(table, f"{given}\t\t1").advance(table, 1100, tuple(ends("0001")))
    assert table.recognise(chain("x", ends("0001", "0000")), given) == f"{given}\t\t1"
    assert table.recognise(chain("x", ends("0000")), given) == given


def test_a_prompt_that_ends_in_an_answer_is_no_first_prompt() -> None:
    table = a_table(decoders=1, capacity_tokens=100_000)
    begun = [{"role": "user", "content": "hi"}]
    for number in range(2):
        begun_answer = {"role": "assistant", "content": f"{number} " * 50}
        own = chain_of([*begun, begun_answer])
        bound(table, f"c{number}", 5000, own)
    assert held(table)["d1"] == (10_000, 2)


def test_what_runs_is_not_displaced_and_nothing_is_in_vain() -> None:
    table = a_table(decoders=1, capacity_tokens=5000)
    a_history(table, NAME, [1000, 4500], "x")
    assert table.bind(f"{NAME}\t\t1", 5001, 0, opening=Opening(chain("more"))) is None
    assert NAME in table
    assert table.begin(NAME, 0) is not None
    assert table.bind(f"{NAME}\t\t1", 2000, 0, opening=Opening(chain("summary"))) is None
    assert table.take_displaced() == []


def test_an_engine_that_has_lost_it_corrects_the_account() -> None:
    table = a_table(decoders=1, capacity_tokens=100_000)
    a_history(table, NAME, [1000, 2000], "x")
    bound(table, f"{NAME}\t\t1", 2200, chain("x", ends("0001", "0000")))
    assert held(table)["d1"] == (2200, 2)
    # It finds nothing, so all idle histories that began so have lost it, too.
    assert Turn.last(table, f"{NAME}\t\t1").advance(table, 2200, tuple(ends("new1")))
    assert the(table, NAME).held_tokens == 0
    assert held(table)["d1"] == (2210, 2)
    # Of the history's second turn all was found.
    assert (table.expected_cached_tokens, table.missing_cached_tokens) == (3000, 2000)


def test_who_holds_nothing_any_more_shares_nothing() -> None:
    """Of equal prompts with equal answers the newest is the nearest, if it still holds any."""
    table = a_table(decoders=1, capacity_tokens=100_000)
    for name in "bac":
        bound(table, name, 1000, chain("x"))
    first, second, third = (Turn.last(table, name) for name in "abc")
    for one, found in ((first, 1000), (second, 0), (third, 1000)):
        seen = TurnStats(1000, 10, found, 0)
        assert table.advance(one.key, one.decoder_id, seen, tuple(ends("0000")), 0)
    assert the(table, "a").held_tokens == 0
    assert held(table)["d1"] == (1010, 3)


def test_of_an_answer_whose_reasoning_is_dropped_less_is_shared() -> None:
    table = a_table(decoders=1, capacity_tokens=100_000)
    a_history(table, NAME, [500], "x")
    assert table.begin(NAME, 0) is not None
    turn = Turn.last(table, NAME)
    # The second prompt begins with 495 tokens of the 500 that the first turn left.
    seen = TurnStats(700, 10, 495, 0)
    assert table.advance(turn.key, turn.decoder_id, seen, tuple(ends("0001")), 0)
    bound(table, f"{NAME}\t\t1", 800, chain("x", ends("0000")))
    assert held(table)["d1"] == (710 + 800 - 495, 2)


def test_the_first_turn_that_was_cut_is_tried_again_under_its_name() -> None:
    table = a_table()
    bound(table, NAME, 500, chain("x"))
    assert Turn.last(table, NAME).abandon(table, stats(500, 3)) is None
    assert table.recognise(chain("x"), NAME) == NAME
    # No other conversation's, and no other prompt.
    assert table.recognise(chain("x"), "other") is None
    assert table.recognise(chain("x")) is None
    assert table.recognise(chain("y"), NAME) is None


@pytest.mark.parametrize("when", ["before", "after", "successor"])
def test_a_turn_that_was_cut_and_begun_anew_beside_itself_counts_once(when: str) -> None:
    """Its client asked again before its leaving was seen."""
    table = a_table(decoders=1, capacity_tokens=100_000)
    a_history(table, NAME, [500], "x")
    assert table.begin(NAME, 0) is not None
    cut = Turn.last(table, NAME)
    again = chain("x", ends("0000"))
    assert table.recognise(again, NAME) is None
    beside = f"{NAME}\t\t1"
    if when == "before":
        assert cut.abandon(table, TurnStats(600, 5, 500, 0)) is None
        assert held(table)["d1"] == (605, 1)
    bound(table, beside, 600, again)
    if when != "before":
        assert cut.abandon(table, TurnStats(600, 5, 500, 0)) is None
    assert held(table)["d1"] == (600, 2)
    if when == "successor":
        # Decoders do not know which of what they hold has given way.
        one, other = the(table, NAME), the(table, beside)
        one.held_tokens, one.base, other.base = 605, None, None
        table = ConversationTable(ConversationPlacement(), IDLE_S, first_id=1000)
        table.add_decoder("d1", 100_000, [one, other])
        assert held(table)["d1"] == (600, 2)
    turn = Turn.last(table, beside)
    seen = TurnStats(600, 20, 500, 0)
    assert table.advance(turn.key, turn.decoder_id, seen, tuple(ends("0001")), 0)
    assert held(table)["d1"] == (620, 2)
    assert table.recognise(chain("x", ends("0001", "0000")), NAME) == beside


def test_a_turn_that_was_cut_stays_while_nobody_has_begun_it_anew() -> None:
    """If its client asks again, what was computed is there."""
    table = a_table(decoders=1, capacity_tokens=100_000)
    a_history(table, NAME, [500], "x")
    bound(table, f"{NAME}\t\t1", 500, chain("x"))
    fork = Turn.last(table, f"{NAME}\t\t1")
    assert fork.abandon(table, TurnStats(490, 0, 490, 0)) is None
    assert table.begin(NAME, 0) is not None
    assert Turn.last(table, NAME).abandon(table, TurnStats(600, 5, 500, 0)) is None
    assert the(table, NAME).held_tokens == 605


def test_ttfet_is_the_conversations_and_counted_once() -> None:
    table = a_table()
    assert table.bind(NAME, 100, 10, opening=Opening(chain("tools"))) is not None
    assert table.bind(f"{NAME}\t\t1", 100, 12, opening=Opening(chain("plain"))) is not None
    assert table.answered(Turn.last(table, f"{NAME}\t\t1").key, 15) == 5
    assert table.answered(Turn.last(table, NAME).key, 16) is None
    assert table.bind("another", 100, 20, opening=Opening(chain("tools"))) is not None
    assert table.answered(Turn.last(table, "another").key, 21) == 1


def test_hints_stay_with_their_history_until_others_come() -> None:
    table = a_table()
    urgent, slow, late = Hints(priority=3), Hints(expected_resume_s=60), Hints(last_step=True)
    assert table.bind(NAME, 100, 0, opening=Opening(chain("x"), 0, urgent)) is not None
    Turn.last(table, NAME).advance(table, 100, tuple(ends("0000")))
    assert table.begin(NAME, 1) is not None
    assert the(table, NAME).hints == urgent
    assert table.begin(NAME, 1, slow) is not None
    assert the(table, NAME).hints == slow
    table.remove_engine(binding(table, NAME) or "")
    assert table.bind(NAME, 100, 2, opening=Opening(chain("x"), 0, late)) is not None
    assert the(table, NAME).hints == late
    # Its decoder comes back to a table that took it for lost.
    own = copy.copy(the(table, NAME))
    home = binding(table, NAME) or ""
    table.remove_engine(home)
    own.hints, own.running = None, ()
    assert table.add_decoder(home, 1000, [own]) == []
    assert the(table, NAME).hints == late


def test_a_tenant_cannot_pass_its_limits_by_one_name() -> None:
    table = a_table()
    for number in range(3):
        bound(table, f"acme\t{NAME}\t\t{number}", 10, chain(f"{number}"))
    usage = table.usage.tenant("acme")
    assert (usage.conversations, usage.histories, usage.begun_lately(0)) == (1, 3, 3)
    for number in range(3):
        table.release(f"acme\t{NAME}\t\t{number}")
    assert (usage.conversations, usage.histories) == (0, 0)
