"""Sums of computed tokens: each cause by its name, text that rotates, the window and its bounds."""

from typing import Any

import msgspec
import pytest

from conserve.cache_account import OTHERS, CacheAccount
from conserve.turn import Broken, TurnStats

ALL = 2100


def turn(found: int = 0, **more: Any) -> TurnStats:
    """A turn that appends 100 tokens to 2,000."""
    return msgspec.structs.replace(TurnStats(ALL, 10, found, had_tokens=2000), **more)


def broken(*at: Any, client: str | None = None) -> TurnStats:
    return turn(had_tokens=0, broken=Broken(*(at or ("system",))), client=client)


def added(*turns: TurnStats | tuple[str, TurnStats]) -> CacheAccount:
    """Count turns, of the conversation "c" where none is named."""
    account = CacheAccount()
    for one in turns:
        account.add(*(one if isinstance(one, tuple) else ("c", one)), 0.0)
    return account


TWICE = [broken()] * 2


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        # A prefiller computed most, and its decoder what is behind the last chunk.
        ([turn(had_tokens=0, lmcache_tokens=2048, prefilled_tokens=2100)], {"first": 2152}),
        ([turn(1984)], {"append": 116}),
        ([broken("first_prompt")], {"message": ALL}),
        ([turn(2090, broken=Broken("system"))], {"append": 10}),
        ([turn()], {"evicted": 2000, "append": 100}),
        ([turn(unbound="paused")], {"paused": 2000, "append": 100}),
        ([turn(128, unbound="moved")], {"moved": 1872, "append": 100}),
        ([turn(unbound="left")], {"lost": 2000, "append": 100}),
        ([turn(had_tokens=0, unbound="unknown")], {"unknown": ALL}),
        ([TurnStats()], {}),
        (TWICE, {"system": 2 * ALL}),
        (TWICE + TWICE + TWICE, {"rotating": 6 * ALL}),
        ([broken("messages", 3, client="agent")] * 3, {"rotating": 3 * ALL}),
        # A sub-agent begins between them.
        ([*TWICE, ("c\t\t5", TurnStats(70, 1)), broken()], {"rotating": 3 * ALL, "first": 70}),
        ([*TWICE, turn(2000), broken()], {"system": 3 * ALL, "append": 100}),
        ([*TWICE, broken("tools")], {"system": 2 * ALL, "tools": ALL}),
        ([(name, broken()) for name in "abc"], {"system": 3 * ALL}),
        ([(name, broken(client="agent")) for name in "abc"], {"rotating": 3 * ALL}),
        # The first conversation is forgotten before its third turn comes.
        ([*TWICE, *((f"{n}", broken()) for n in range(5000)), broken()], {"system": 5003 * ALL}),
    ],
)
def test_each_cause_has_its_tokens_and_three_breaks_at_one_place_are_rotating(
    turns: list[Any], found: dict[str, int]
) -> None:
    sums = added(*turns).spent(60, 0.0)
    assert {key.cause: one.tokens for key, one in sums.items()} == found


def test_seconds_and_joules_are_shared_by_tokens_and_an_example_goes_with_its_cause() -> None:
    lost = turn(engine_prefill_s=1.5, prefiller_s=0.6, prefill_j=210.0)
    edited = broken("messages", 7, False)
    account = added(("acme\tc", lost), ("d\t\t3", edited), ("e", broken()), *TWICE, broken())
    found = {key.cause: one for key, one in account.spent(60, 0.0).items()}
    assert (found["evicted"].seconds, found["append"].seconds) == pytest.approx((2.0, 0.1))
    assert (found["evicted"].joules, found["append"].joules) == pytest.approx((200.0, 10.0))
    examples = {"evicted": "acme\tc", "append": "acme\tc", "message": "d", "system": ""}
    assert {cause: one.example for cause, one in found.items()} == {**examples, "rotating": "c"}
    assert found["message"].where == "after message 7 or later"
    assert {key.tenant for key in account.spent(60, 0.0, "acme")} == {"acme"}


def test_the_joules_of_turns_go_to_their_cause_when_it_is_known() -> None:
    turns = [msgspec.structs.replace(one, prefill_j=3.0) for one in TWICE]
    (system,) = added(*turns).spent(60, 0.0).values()
    (rotating,) = added(*turns, broken()).spent(60, 0.0).values()
    assert (system.joules, rotating.joules) == (6.0, 6.0)


def test_sums_are_of_the_last_minutes_and_of_a_bounded_number_of_clients() -> None:
    account = CacheAccount()
    for minute in (0, 30, 60):
        account.add("c", turn(2000 + minute), 60.0 * minute)
    last = [sum(one.tokens for one in account.spent(n, 3630.0).values()) for n in (60, 59, 1)]
    assert last == [210, 110, 40]
    for number in range(3000):
        account.add(f"{number}", turn(2000, client=f"agent-{number}"), 60.0 * 121)
    # What is older than an hour is not even kept.
    found = {key.client: one.tokens for key, one in account.spent(1000, 7260.0).items()}
    assert (len(found), found[OTHERS]) == (501, 2500 * 100)
