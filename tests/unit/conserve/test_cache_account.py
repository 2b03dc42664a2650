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


def added(*turns: tuple[str, TurnStats]) -> CacheAccount:
    account = CacheAccount()
    for history_id, stats in turns:
        account.add(history_id, stats, 0.0)
    return account


@pytest.mark.parametrize(
    ("stats", "found"),
    [
        # A prefiller computed most, and its decoder what is behind the last chunk.
        (turn(had_tokens=0, lmcache_tokens=2048, prefilled_tokens=2100), {"first": 2152}),
        (turn(1984), {"append": 116}),
        (broken("first_prompt"), {"message": ALL}),
        (turn(2090, broken=Broken("system")), {"append": 10}),
        (turn(), {"evicted": 2000, "append": 100}),
        (turn(unbound="paused"), {"paused": 2000, "append": 100}),
        (turn(unbound="moved"), {"moved": 2000, "append": 100}),
        (turn(128, unbound="lost"), {"lost": 1872, "append": 100}),
        (turn(unbound="left"), {"lost": 2000, "append": 100}),
        (turn(had_tokens=0, unbound="unknown"), {"unknown": ALL}),
        (TurnStats(), {}),
    ],
)
def test_each_cause_has_its_tokens(stats: TurnStats, found: dict[str, int]) -> None:
    sums = added(("c", stats)).spent(60, 0.0)
    assert {key.cause: one.tokens for key, one in sums.items()} == found


THRICE = [("c", broken())] * 3


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        (THRICE[:2], {"system": 2}),
        (THRICE + THRICE[:2], {"rotating": 5}),
        ([("c", broken("messages", 3, client="agent"))] * 3, {"rotating": 3}),
        # A sub-agent begins between them.
        ([*THRICE[:2], ("c\t\t5", TurnStats(ALL, 1)), THRICE[2]], {"rotating": 3, "first": 1}),
        ([*THRICE[:2], ("c", turn(unbound="lost")), THRICE[2]], {"system": 3, "lost": 1}),
        ([*THRICE[:2], ("c", broken("tools"))], {"system": 2, "tools": 1}),
        ([(name, broken()) for name in "abc"], {"system": 3}),
        ([(name, broken(client="agent")) for name in "abc"], {"rotating": 3}),
        # The first conversation is forgotten before its third turn comes.
        ([*THRICE[:2], *((f"{n}", broken()) for n in range(5000)), THRICE[2]], {"system": 5003}),
    ],
)
def test_text_rotates_if_three_turns_in_a_row_break_at_one_place(
    turns: list[tuple[str, TurnStats]], found: dict[str, int]
) -> None:
    sums = added(*turns).spent(60, 0.0)
    assert {key.cause: one.turns for key, one in sums.items() if key.cause != "append"} == found
    assert sum(one.tokens for one in sums.values()) == len(turns) * ALL


def test_seconds_are_shared_by_tokens_and_an_example_goes_with_its_cause() -> None:
    lost, edited = turn(engine_prefill_s=1.5, prefiller_s=0.6), broken("messages", 7, False)
    account = added(("acme\tc", lost), ("d\t\t3", edited), ("e", broken()), *THRICE)
    found = {key.cause: one for key, one in account.spent(60, 0.0).items()}
    assert (found["evicted"].seconds, found["append"].seconds) == pytest.approx((2.0, 0.1))
    examples = {"evicted": "acme\tc", "append": "acme\tc", "message": "d", "system": ""}
    assert {cause: one.example for cause, one in found.items()} == {**examples, "rotating": "c"}
    assert found["message"].where == "after message 7 or later"
    assert {key.tenant for key in account.spent(60, 0.0, "acme")} == {"acme"}


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
