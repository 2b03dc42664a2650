"""Whatever happens to turns, all end with their own tokens, and every block comes back."""

from collections import Counter
from dataclasses import asdict

import pytest

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
