"""Whatever happens to turns, all end with their own tokens, and every block comes back."""

from collections import Counter
from dataclasses import asdict

import pytest

from conserve_inside.scheduler.histories import Histories
from tests.unit.conserve_inside.scheduler.play import POLICIES, play
from tests.unit.conserve_inside.scheduler.stand_in import StandIn

# With two steps in flight, too: the only place where that is played without a GPU.
KINDS = ("sync", "async")


def played(kind: str, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen.update(asdict(play(StandIn(kind=kind, policies=POLICIES), seed)))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_ends_with_its_tokens_and_no_block_leaks(kind: str) -> None:
    seen = played(kind, range(6))
    assert seen["turns"] > 200
    # And it was no walk in the park.
    for what in ("aborted", "preempted", "reclaimed_blocks", "cut", "parts", "released"):
        assert seen[what] > 0, what


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_for_longer(kind: str) -> None:
    assert played(kind, range(100, 160)).total() > 2_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_in_the_wrong_place_is_found(kind: str) -> None:
    def spoil(sampled: dict[str, list[int]]) -> None:
        for tokens in sampled.values():
            if tokens and tokens[0] == 333:
                tokens[0] = 334

    engine = StandIn(kind=kind, policies=POLICIES, spoil=spoil)
    with pytest.raises(AssertionError, match="wrong tokens"):
        play(engine, 0)


def test_a_block_that_is_kept_for_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    free_kept = Histories._free_kept

    def forgetful(self: Histories, key: str, one: object) -> None:
        one.blocks = one.blocks[1:]  # type: ignore[attr-defined]
        free_kept(self, key, one)  # type: ignore[arg-type]

    monkeypatch.setattr(Histories, "_free_kept", forgetful)
    with pytest.raises(AssertionError, match=r"leaked|never end"):
        play(StandIn(policies=POLICIES), 0)


def test_a_history_whose_turn_is_lost_is_found() -> None:
    engine = StandIn(policies=POLICIES)
    engine.add("lost", range(40), key="c")
    engine.scheduler.waiting.remove_requests(list(engine.scheduler.waiting))
    with pytest.raises(AssertionError, match="never end"):
        engine.drain(200)
