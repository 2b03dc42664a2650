"""Clients that misbehave and processes that die, by seed, in virtual time.

The plans are those of `make test-chaos`, which plays them on engines.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from conserve.placement import PolicyName
from tests.acceptance.chaos.plan import Plan
from tests.unit.deployments.chaos_world import Errors, play
from tests.unit.deployments.table.virtual_time import run

SEEDS = 24
SIZE = 0.15
# LMCache and node actors only make prefills slower.
VICTIMS = ("decoder", "engine core", "both decoders", "prefiller", "table", "router")


@pytest.fixture
def errors() -> Iterator[Errors]:
    """What is logged as an error; the rest, which is much, is not kept."""
    handler = Errors()
    root = logging.getLogger()
    logging.disable(logging.WARNING)
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("placement", "pace"), [("conversation", 1.0), ("conversation", 0.1), ("elastic", 0.3)]
)
def test_every_conversation_ends_and_all_accounts_agree(
    errors: Errors, placement: PolicyName, pace: float
) -> None:
    retries: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    restores: Counter[str] = Counter()
    on_prefillers: set[str] = set()
    turns = 0
    for seed in range(SEEDS):
        plan = Plan(seed, 5, 40.0, 8.0, VICTIMS, pace, SIZE)

        async def scenario(plan: Plan = plan) -> None:
            nonlocal turns
            world = await play(plan, placement)
            on_prefillers.update(world.on_prefillers)
            retries.update(world.retries)
            killed.update(world.killed)
            restores.update(world.restores)
            turns += world.turns

        try:
            run(scenario())
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        assert not errors.seen, f"seed {seed}: {errors.seen[0]}"
    # It is what it is meant to be.
    assert turns > 40 * SEEDS
    assert set(killed) == {*VICTIMS, "silence"}
    causes = {"cut", "router gone", "no router", "cancel", "reconnect", "vanish", "503 unavailable"}
    assert causes < set(retries)
    # At the quicker paces too few are pushed out of their engine to count on it.
    assert restores["reloaded" if pace == 1.0 else "kept"], restores
    assert bool(on_prefillers) == (placement == "elastic")
