"""In which order idle histories give up their room."""

from conserve.pausing import Gaps, Idle, Pausing


def idle(name: str, tokens: int, idle_s: float = 1.0, held: int | None = None) -> Idle:
    return Idle(name, tokens, held or tokens, idle_s)


def order(policy: Pausing, *those: Idle) -> list[str]:
    return [one.id for one in policy.order(those)]


def test_the_short_go_before_the_long_and_the_long_idle_before_those_that_come_back() -> None:
    policy = Pausing()
    assert order(policy, idle("l", 60_000), idle("s", 500), idle("m", 9000)) == ["s", "m", "l"]
    assert order(policy, idle("now", 500, 0.5), idle("gone", 60_000, 900.0)) == ["gone", "now"]


def test_what_others_begin_with_too_frees_little_for_its_cost() -> None:
    """Of 9,000 tokens that have to be loaded again, 500 would come free."""
    assert order(Pausing(), idle("fork", 500, held=9000), idle("alone", 9000)) == ["alone", "fork"]
    assert order(Pausing(), idle("nothing", 0, held=9000)) == []


def test_the_gaps_that_were_seen_decide() -> None:
    """Tools here take two seconds, or minutes: who was away for ten seconds is not back soon."""
    gaps = Gaps()
    for _ in range(200):
        gaps.returned(2.0)
        gaps.returned(300.0)
    policy = Pausing(gaps=gaps)
    assert order(policy, idle("fresh", 500, 0.5), idle("away", 2000, 10.0)) == ["away", "fresh"]


def test_only_what_is_above_the_mark_is_too_much() -> None:
    assert Pausing(0.9).excess_tokens(950, 1000) == 50
    assert Pausing(0.9).excess_tokens(900, 1000) == 0
    assert Pausing().excess_tokens(999, 1000) == 0
