"""A later turn goes straight to the decoder that its router remembers, and how that may end."""

from pathlib import Path
from typing import Any

import pytest

from conserve import wire
from conserve.direct import Homes
from conserve.recognition import chain_of
from conserve.tenants import Limits
from conserve.turn import TurnKey
from deployments.messages import TurnPlan
from deployments.router.access import Access
from tests.unit.deployments.router.fakes import (
    FakeEngines,
    FakeTable,
    Keys,
    ask,
    endpoint_of,
    told_by,
)
from tests.unit.deployments.router.images import data_url, png

FIRST = [{"role": "user", "content": "hello"}]
LATER = [*FIRST, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "on"}]
DIRECT = {"direct": True}


def play(
    *chats: list[Any] | dict[str, Any],
    table: FakeTable | None = None,
    engines: FakeEngines | None = None,
    homes: Homes | None = None,
    headers: dict[str, str] | None = None,
    access: Access | None = None,
    **settings: Any,
) -> tuple[FakeTable, FakeEngines, list[dict[str, str]]]:
    """Chats, and completions, through one router, one after the other; their answers' headers."""
    table, engines = table or FakeTable(plan=DIRECT), engines or FakeEngines()
    endpoint = endpoint_of(table, engines, **settings)
    endpoint.homes = Homes() if homes is None else homes
    answers = []
    for asked in chats:
        turn = (
            ({"messages": asked}, "/v1/chat/completions")
            if isinstance(asked, list)
            else (asked, "/v1/completions")
        )
        status, found, body = ask(endpoint, *turn, headers=headers, access=access)
        assert status == 200, body
        answers.append(found)
    return table, engines, answers


def test_it_goes_straight() -> None:
    table, engines, (first, later) = play(FIRST, LATER)
    assert table.asked == ["begin"]
    assert first["x-conserve-decoder"] == later["x-conserve-decoder"] == "d1"
    assert later["x-conversation-id"] == "c"
    (told,) = engines.straight
    assert told.straight is not None
    assert (told.reader.router_id, told.straight.stated_id) == ("router", None)
    assert len(told.root) == len(told.straight.end) == 16
    # From this the decoder computes by what the next turn is recognised.
    assert told.beginning == chain_of(LATER).beginning


def test_a_turn_that_is_bound_nowhere_is_counted_and_asked_for_again() -> None:
    table, _, _ = play(LATER)
    first, second = table.begun
    assert (first.history_id, first.prompt_tokens) == (None, None)
    assert (second.history_id, second.prompt_tokens) == ("c", 3)
    # By its number either call can be cancelled.
    assert first.number != second.number
    assert second.waited_s > first.waited_s > 0


def test_a_completion_goes_straight_by_its_conversations_id() -> None:
    named = {"prompt": [1, 2, 3], "conversation_id": "mine"}
    table, engines, _ = play(named, named, named)
    assert table.asked == ["begin"]
    for told in engines.straight:
        assert told.straight == wire.Straight(stated_id="mine")
        assert told.root == b""
    assert len(engines.straight) == 2


def test_a_completion_without_an_id_asks_and_is_not_remembered() -> None:
    homes = Homes()
    table, engines, _ = play({"prompt": "on"}, {"prompt": "on"}, homes=homes)
    assert table.asked == ["begin"] * 2
    assert engines.straight == []
    # Its conversation ends with it.
    assert len(homes) == 0
    play({"prompt": "on", "conversation_id": "mine"}, homes=homes)
    assert len(homes) == 1


def test_what_is_refused_is_asked_for() -> None:
    table, engines, _ = play(FIRST, LATER, engines=FakeEngines(straight_will="refuse"))
    # The table, which has it bound nowhere, asks for its length.
    assert [one.prompt_tokens for one in table.begun] == [3, None, 3]
    # What that decoder has done by then is to be known first.
    assert [one.refused_by for one in table.begun] == [None, "d1", "d1"]
    assert engines.served == ["d1", "d2"]


def test_a_decoder_that_is_lost_with_it_is_reported() -> None:
    table, _, (_, later) = play(FIRST, LATER, engines=FakeEngines(straight_will="die"))
    assert table.lost == ["d1"]
    assert later["x-conserve-decoder"] == "d2"


def test_another_first_prompt_and_a_policy_that_wants_to_be_asked_are_asked_for() -> None:
    other = [{"role": "user", "content": "other"}, *LATER[1:]]
    for given, chats in ((DIRECT, (FIRST, other)), ({}, (FIRST, LATER))):
        table, engines, _ = play(*chats, table=FakeTable(plan=given))
        assert engines.straight == []
        assert len(table.placed) == 2


@pytest.mark.parametrize(
    ("limits", "straight"),
    [(Limits(), 1), (Limits(conversations=5), 1), (Limits(turns=2), 0), (Limits(held_tokens=9), 0)],
)
def test_whoever_has_a_limit_of_what_turns_take_is_asked_for(
    limits: Limits, straight: int, tmp_path: Path
) -> None:
    _, engines, _ = play(FIRST, LATER, **Keys(tmp_path, limits).of_acme)
    told = [one.straight and one.straight.tenant for one in engines.straight]
    assert told == ["acme"] * straight


FAR = [*LATER[:-1], {"role": "user", "content": "on " * 2000}]
FURTHER = [*FAR, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and on"}]


def test_the_table_says_where_a_turn_that_appends_much_is_prefilled() -> None:
    at_p1 = TurnPlan(
        TurnKey("c", 1, 256), "d1", "http://d1", "p1", "http://p1", later=True, looks_up=True,
        direct=True,
    )  # fmt: skip
    table = FakeTable(plan=DIRECT, later=at_p1)
    _, engines, _ = play(FIRST, LATER, FAR, FURTHER, table=table, placement="elastic")
    assert table.asked == ["begin", "begin"]
    # It was counted, once, by the decoder that has its history.
    assert [one.prompt_tokens for one in table.begun] == [3, 3]
    assert engines.counted == ["http://tokenizer", "http://d1"]
    assert engines.served == ["d1", "p1", "d1"]
    assert len(engines.straight) == 2
    # What it finds there is looked up.
    assert told_by(engines.got[-1][0]).looks_up


def seen(text: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_url(png())}}
    return {"role": "user", "content": [{"type": "text", "text": text}, image]}


def test_a_turn_that_appends_an_image_appends_much() -> None:
    first = [seen("look")]
    later = [*first, {"role": "assistant", "content": "so"}, {"role": "user", "content": "on"}]
    again = [*later, {"role": "assistant", "content": "so"}, seen("and now?")]
    last = [*again, {"role": "assistant", "content": "so"}, {"role": "user", "content": "on"}]
    table, engines, _ = play(first, later, again, last, placement="elastic")
    assert [one.prompt_tokens for one in table.begun] == [3, 3]
    assert len(engines.straight) == 2


@pytest.mark.parametrize("settings", [{"placement": "conversation"}, {"pausing": False}])
def test_a_turn_that_appends_much_asks_nobody_where_it_stays_anyway(settings: Any) -> None:
    table, engines, _ = play(FIRST, FAR, **settings)
    assert table.asked == ["begin"]
    assert len(engines.straight) == 1
