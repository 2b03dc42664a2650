"""The order in which idle histories give up their room."""

from dataclasses import replace
from math import inf

from conserve.pausing import Gaps, Idle, Pausing


def idle(
    name: str, tokens: int, idle_s: float = 1.0, freed: int | None = None, left: int | None = None
) -> Idle:
    freed, left = tokens if freed is None else freed, tokens if left is None else left
    return Idle(name, tokens, freed, left, idle_s)


def order(policy: Pausing, *those: Idle) -> list[str]:
    return [one.id for one in policy.order(those)]


def test_the_short_go_before_the_long_and_the_long_idle_before_those_that_come_back() -> None:
    policy = Pausing()
    assert order(policy, idle("l", 60_000), idle("s", 500), idle("m", 9000)) == ["s", "m", "l"]
    assert order(policy, idle("now", 500, 0.5), idle("gone", 60_000, 900.0)) == ["gone", "now"]


def test_what_others_begin_with_too_frees_little_for_its_cost() -> None:
    """To free 500 tokens, 9,000 would have to be loaded again."""
    assert order(Pausing(), idle("fork", 9000, freed=500), idle("alone", 9000)) == ["alone", "fork"]


def test_the_background_goes_first() -> None:
    longer = replace(idle("behind", 9000), background=True)
    assert order(Pausing(), idle("short", 2000), longer, idle("s", 500)) == ["behind", "s", "short"]


def test_the_longest_served_tenants_go_first_and_what_is_away_before_them() -> None:
    leads = {"most": 40_000.0, "more": 20_000.0, "level": 0.0, "behind": -(10.0**9)}
    those = [replace(idle(name, 9000), lead=lead) for name, lead in leads.items()]
    gone = idle("gone", 60_000, 3600.0)
    policy = Pausing()
    assert order(policy, *reversed(those), gone) == ["gone", "most", "more", "level", "behind"]
    assert [one.id for one in (*those, gone) if policy.may_go(one)] == ["most", "more", "gone"]


def test_what_its_engine_has_lost_costs_nothing() -> None:
    lost = idle("lost", 9000, left=4000)
    assert order(Pausing(), idle("s", 500), idle("lost", 9000, left=0)) == ["lost", "s"]
    assert Pausing().is_away(lost)
    assert not Pausing().is_away(idle("whole", 9000, left=5000))


def test_the_gaps_that_were_seen_decide() -> None:
    """Tools here take two seconds, or minutes: after ten seconds a history is not back soon."""
    gaps = Gaps()
    for _ in range(200):
        gaps.add(2.0)
        gaps.add(300.0)
    policy = Pausing(gaps=gaps)
    fresh, away = idle("fresh", 500, 0.5), idle("away", 2000, 10.0)
    assert order(policy, fresh, away) == ["away", "fresh"]
    assert (policy.is_away(fresh), policy.is_away(away)) == (False, True)


def test_where_many_do_not_come_back_nobody_is_waited_for() -> None:
    """None of ninety chats has had a second turn yet."""
    chat = Idle("chat", 100, 100, 100, 5.0, still_idle=45)
    assert not Pausing().is_away(idle("agent", 100, 5.0))
    assert Pausing().is_away(chat)
    # Unless many did.
    gaps = Gaps()
    for _ in range(400):
        gaps.add(8.0)
    assert not Pausing(gaps=gaps).is_away(chat)


def test_only_what_is_above_the_mark_is_too_much() -> None:
    assert Pausing(0.9).excess_tokens(950, 1000) == 50
    assert Pausing(0.9).excess_tokens(900, 1000) == 0
    assert Pausing().excess_tokens(999, 1000) == 0


def test_who_is_parked_costs_a_reload_and_may_go() -> None:
    policy = Pausing()
    half, less, whole, nothing = (
        Idle(name, 8000, 8000, 8000, 1.0, parked_tokens=parked)
        for name, parked in (("half", 4000), ("less", 3999), ("whole", 8000), ("nothing", 0))
    )
    those = (whole, half, less, nothing)
    assert [one.id for one in those if policy.may_go(one)] == ["whole", "half"]
    assert policy.may_go(idle("away", 8000, 900.0))
    assert order(policy, nothing, half, whole) == ["whole", "half", "nothing"]
    # A quarter of what the tokens take without attention to each other, whatever the length.
    assert policy.price(whole) == policy.price(nothing) * 0.25 / (1 + 8000 / 32_768)
    # Who has lost half of itself pays for what it has yet, and host memory has that.
    assert policy.price(whole) == 2 * policy.price(
        Idle("lost half", 8000, 8000, 4000, 1.0, parked_tokens=8000)
    )


def test_turns_park_where_a_decoder_fills_up_if_host_memory_keeps_it_for_longer() -> None:
    policy = Pausing()
    assert [policy.parks(share, 60.0, inf) for share in (0.0, 0.49, 0.5, 1.2)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert [policy.parks(0.9, 60.0, host_s) for host_s in (30.0, 60.0, 61.0)] == [
        False, False, True,
    ]  # fmt: skip
    # A disk below has all, whatever host memory keeps.
    assert Pausing(park_mark=0.0).parks(0.0, 60.0, 30.0)


def test_to_know_the_tool_keeps_some_and_sends_nobody_away_sooner() -> None:
    gaps = Gaps()
    for _ in range(100):
        gaps.add(40.0, "")
        gaps.add(1.0, "bash")
        gaps.add(1.0)
    by_tool = {tool: Idle("a", 500, 500, 500, 0.0, tool=tool) for tool in ("", "bash", None)}
    policy = Pausing(gaps=gaps)
    # The user will not be back within half a minute; but what if that was no question?
    assert gaps.chance(0.0, 30, tool="") < policy.away_chance
    assert not any(policy.is_away(one) for one in by_tool.values())
    assert policy.cost(by_tool[""]) < policy.cost(by_tool[None]) < policy.cost(by_tool["bash"])
    # Most that are idle are not expected, but who has called a shell is.
    for _ in range(3000):
        gaps.add(1800.0, "", ended=True)
    assert [policy.is_away(one) for one in by_tool.values()] == [True, False, True]
    assert not policy.is_away(Idle("a", 500, 500, 500, 0.0, tool="", tool_ended=True))


def test_an_engine_holds_until_most_are_back_and_not_at_all_where_few_come() -> None:
    policy = Pausing()
    for number in range(200):
        policy.gaps.add(1.0 if number % 20 else 30.0, "shell")
        policy.gaps.add(12.0, "search")
        policy.gaps.add(1800.0, "", ended=True)
    assert [policy.hold_s(tool) for tool in ("shell", "search", "")] == [2.0, 16.0, 0.0]
