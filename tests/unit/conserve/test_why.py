"""The reason for a slow turn: the sentence, and the facts that a table records for it."""

from typing import Any

import msgspec
import pytest

from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.pausing import Pausing
from conserve.recognition import chain_of
from conserve.turn import Broken, TurnStats
from conserve.why import why_slow
from tests.unit.conserve.conversations.scene import Turn, a_table, start, the
from tests.unit.conserve.recognition.messages import Message, said


def warm(**more: Any) -> TurnStats:
    """A later turn that finds what it had."""
    known = TurnStats(2100, 10, 2090, idle_s=3.0, had_tokens=2000)
    return msgspec.structs.replace(known, **more)


def cold(**more: Any) -> TurnStats:
    """A later turn that finds nothing of what it had."""
    return msgspec.structs.replace(warm(idle_s=40.0, decoder_cached_tokens=0), **more)


UNKNOWN = "its earlier turns are not known here"
ALL = "(2,100 tokens computed)"
CHANGED = "the client changed"


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (warm(), None),
        (warm(room_s=0.4, engine_wait_s=0.4, encode_s=0.4, prefill_s=0.4), None),
        (cold(), f"evicted while idle for 40 s {ALL}"),
        (cold(unbound="paused"), f"paused to make room, and evicted while idle for 40 s {ALL}"),
        (warm(unbound="paused"), None),
        (cold(unbound="moved"), f"moved off a busier engine: prefilled again {ALL}"),
        (cold(unbound="lost"), f"its engine was lost: prefilled again {ALL}"),
        (cold(unbound="left"), f"its engine has left: prefilled again {ALL}"),
        (cold(unbound="lost", lmcache_tokens=2048),
         "its engine was lost: 2,048 tokens read from host memory or a disk"),
        (cold(unbound="unknown", had_tokens=0, prefilled_tokens=2100, lmcache_tokens=2100,
              prefiller_cached_tokens=1900),
         f"{UNKNOWN}: 1,900 tokens read from host memory or a disk"),
        (cold(unbound="unknown", had_tokens=0), f"{UNKNOWN}: prefilled again {ALL}"),
        # A prefiller computed it, and the decoder took it from there.
        (cold(remote_prefill_s=2.13, prefilled_tokens=2099, lmcache_tokens=2099),
         "evicted while idle for 40 s (2,099 tokens computed); waited 2.1 s for a prefill"),
        # A first turn had nothing to lose.
        (cold(had_tokens=0, idle_s=None), None),
        (cold(had_tokens=0, idle_s=None, remote_prefill_s=0.4, prefilled_tokens=2100,
              lmcache_tokens=2048), None),
        # A template dropped the reasoning of earlier answers.
        (cold(decoder_cached_tokens=1200), None),
        (warm(room_s=3.0), "waited 3.0 s for room"),
        (warm(room_s=12.2, room_why="window"),
         "waited 12 s because as many conversations were active as the window admits"),
        (warm(remote_prefill_s=1.0, prefill_failed=True),
         "waited 1.0 s for a prefill that failed, so its decoder computed the prompt"),
        (warm(encode_wait_s=0.6, encode_s=1.2, encoded_images=3),
         "waited 0.6 s for its images; encoded 3 new images (1.2 s)"),
        (warm(encode_s=1.2, encoded_images=1), "encoded a new image (1.2 s)"),
        (warm(missed_tokens=1024),
         "its decoder did not find 1,024 prefilled tokens, and computed them"),
        (warm(engine_wait_s=0.8, engine_wait_for="step"),
         "waited 0.8 s for other calls of its engine"),
        (warm(prefill_s=4.0), "its prompt took 4.0 s in the prefill lane"),
        (cold(broken=Broken("messages", 7), had_tokens=0, decoder_cached_tokens=1600),
         f"prefix broken after message 7: {CHANGED} what follows (500 tokens computed)"),
        (cold(broken=Broken("messages", exact=False)),
         f"prefix broken after its first prompt or later: {CHANGED} what follows {ALL}"),
        (cold(broken=Broken("system")),
         f"prefix broken at its beginning: {CHANGED} its system prompt {ALL}"),
        (cold(broken=Broken("tools")),
         f"prefix broken at its beginning: {CHANGED} its tools {ALL}"),
        (cold(broken=Broken("first_prompt")),
         f"prefix broken before its first answer: {CHANGED} its first prompt, or what precedes it "
         f"{ALL}"),
        # All of it was found all the same.
        (warm(broken=Broken("messages", 7)), None),
    ],
)  # fmt: skip
def test_a_reason_is_given_only_if_it_was_recorded(known: TurnStats, sentence: str | None) -> None:
    assert why_slow(known) == sentence


# --- what a table records -------------------------------------------------------------------------


def talk(*texts: str) -> list[Message]:
    """Messages by turns of the user and the assistant, after a system prompt."""
    system, *rest = texts
    messages: list[Message] = [{"role": "system", "content": system}]
    for number, text in enumerate(rest):
        messages.append(said(text) if number % 2 else {"role": "user", "content": text})
    return messages


OLD = ("Help.", "one", "1", "two", "2", "three", "3", "four")
SYSTEM_TOKENS = 80


def played(table: ConversationTable, history_id: str, texts: tuple[str, ...]) -> None:
    """Play a conversation's turns, each with 100 tokens more."""
    for number, length in enumerate(range(2, len(texts) - 1, 2), 1):
        chain = chain_of(talk(*texts[:length]))
        if table.begin(history_id, 0.0) is None:
            opening = Opening(chain, SYSTEM_TOKENS)
            assert table.bind(history_id, 100, 0.0, opening=opening) is not None
        turn = Turn.last(table, history_id)
        tail = chain_of(talk(*texts[: length + 2])).ends[0]
        home = the(table, history_id).home
        assert home is not None
        assert table.advance(turn.key, home, TurnStats(100 * number, 10, 0, 0), (tail,), 0.0)


def bound(table: ConversationTable, history_id: str, *texts: str, tools: Any = None) -> TurnStats:
    """Bind a history that begins with these messages; returns its turn's record."""
    opening = Opening(chain_of(talk(*texts), tools and {"tools": tools}), SYSTEM_TOKENS)
    assert table.bind(history_id, 400, 1.0, opening=opening) is not None
    return table.record(Turn.last(table, history_id).id)


def broken_at(*texts: str, tools: Any = None) -> Broken | None:
    table = a_table(decoders=1, prefillers=0, capacity_tokens=10_000)
    played(table, "agent", OLD)
    return bound(table, "agent\t\t1", *texts, tools=tools).broken


@pytest.mark.parametrize(
    ("texts", "broken"),
    [
        (("Help.", "one", "1", "two", "2", "THREE", "3", "four"), Broken("messages", 5)),
        (("Help.", "one", "1", "two", "2", "three", "THREE", "four"), Broken("messages", 5)),
        (("Help.", "one", "changed", "two", "2", "three"), Broken("messages")),
        (("Help!", "one", "1", "two", "2", "three"), Broken("system")),
        (("Help.", "ONE", "1", "two", "2", "three"), Broken("first_prompt")),
        # It goes back to an answer, and on from there.
        (("Help.", "one", "1", "two", "2", "THREE"), None),
        # A sub-agent begins.
        (("Other.", "one"), None),
    ],
)
def test_a_broken_prefix_is_found_where_it_breaks(
    texts: tuple[str, ...], broken: Broken | None
) -> None:
    assert broken_at(*texts) == broken


def test_a_changed_tool_list_is_told_from_a_changed_system_text() -> None:
    for system in ("Help.", "Help!"):
        assert broken_at(system, *OLD[1:], tools=[{"name": "open"}]) == Broken("tools")


def test_a_history_whose_earlier_turns_are_not_known_is_told_from_a_new_one() -> None:
    table = a_table(decoders=1, prefillers=0, capacity_tokens=10_000)
    of = (("goes on", OLD), ("goes on\t\t1", OLD[:4]), ("new", OLD[:2]))
    assert [bound(table, id, *texts).unbound for id, texts in of] == ["unknown", None, None]


def test_a_history_that_is_bound_nowhere_hides_no_changed_system_prompt() -> None:
    table = a_table(decoders=1, prefillers=0, capacity_tokens=10_000)
    played(table, "agent", OLD)
    table.remove_engine("d1")
    table.add_decoder("d2", 10_000)
    played(table, "agent\t\t1", ("Help!", *OLD[1:]))
    assert bound(table, "agent\t\t2", "HELP", *OLD[1:]).broken == Broken("system")


def test_a_history_that_forgot_answers_says_so() -> None:
    table = a_table(decoders=1, prefillers=0, capacity_tokens=10_000)
    long = ("Help.", *(f"{number}" for number in range(41)))
    played(table, "agent", long)
    broken = bound(table, "agent\t\t1", *long[:-4], *["changed"] * 4).broken
    assert broken is not None
    assert not broken.exact


def test_a_table_knows_why_a_history_has_no_engine_and_how_long_it_was_idle() -> None:
    table = a_table(decoders=1, prefillers=0, pausing=Pausing())
    first = start(table, "c", 600)
    assert table.record(first.id).idle_s is None
    assert first.advance(table, 600, now_s=5.0)
    assert not table._ledger.records

    # Another history does not fit beside it.
    assert start(table, "other", 600, 905.0).advance(table, 600, now_s=905.0)
    assert the(table, "c").home is None
    again = start(table, "c", 700, 1905.0)
    record = table.record(again.id)
    assert (record.unbound, record.had_tokens, record.idle_s) == ("paused", 610, 1900.0)
    assert again.advance(table, 700, now_s=1906.0)

    table.remove_engine("d1")
    table.add_decoder("d2", 1000)
    assert table.record(start(table, "c", 800, 1907.0).id).unbound == "lost"


def test_an_engine_that_leaves_is_not_said_to_be_lost() -> None:
    table = a_table(decoders=1, prefillers=0)
    assert start(table, "c", 600).advance(table, 600)
    running = start(table, "running", 100)
    table.leave("d1")
    table.evict("d1")
    table.remove_engine("d1")
    assert not table._ledger.records, running
    table.add_decoder("d2", 1000)
    assert table.record(start(table, "c", 600).id).unbound == "left"
    assert table.record(start(table, "running", 100).id).unbound == "left"
