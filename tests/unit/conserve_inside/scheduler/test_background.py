"""Background calls beside interactive ones on one engine."""

from typing import Any

import pytest

from tests.unit.conserve_inside.scheduler.stand_in import StandIn

KINDS = ("sync", "async")


def beside(kind: str, agents: int, **policies: Any) -> StandIn:
    """Return an engine on which a person has a turn beside agents, just after its end."""
    engine = StandIn(
        kind=kind, blocks=600, max_num_seqs=30, step_tokens=2048, step_s=0.005, token_s=1e-3,
        policies=policies,
    )  # fmt: skip
    for number in range(agents):
        tokens = range(number, number + 100)
        engine.add(f"agent{number}", tokens, 400, f"agent{number}", background=True)
    for _ in range(30):
        engine.step()
    engine.add("person", range(900, 1000), 50, "person")
    engine.add("later", range(901, 1401), 4, "later", background=True)
    while "person" in engine.live:
        engine.step()
    return engine


def lasted_s(engine: StandIn, name: str) -> float:
    return engine.token_times_s[name][-1] - engine.added_s[name]


@pytest.mark.parametrize("kind", KINDS)
def test_an_interactive_turn_takes_hardly_longer_beside_background_ones(kind: str) -> None:
    alone, engine = beside(kind, 0), beside(kind, 12)
    assert lasted_s(engine, "person") < 1.2 * lasted_s(alone, "person")
    assert "later" not in engine.token_times_s
    unordered = beside(kind, 12, mechanisms=("chunks", "retention"))
    assert lasted_s(unordered, "person") > 3 * lasted_s(alone, "person")
    engine.drain()
    assert not engine.wrong
    engine.require_no_leak()


@pytest.mark.parametrize("kind", KINDS)
def test_a_background_turn_ends_though_interactive_ones_never_do(kind: str) -> None:
    engine = StandIn(kind=kind, blocks=600, policies={"background": {"longest_s": 0.5}})
    engine.add("person0", range(100), 60, "person0")
    engine.step()
    engine.add("agent", range(1, 300), 60, "agent", background=True)
    number = 0
    while "agent" in engine.live:
        if len(engine.live) < 3:
            number += 1
            engine.add(f"person{number}", range(number, number + 100), 60, f"person{number}")
        engine.step()
        assert number < 60
    assert engine.token_times_s["agent"][0] - engine.added_s["agent"] > 0.4
    assert lasted_s(engine, "agent") < 2.0
    engine.drain()
    engine.require_no_leak()


@pytest.mark.parametrize("kind", KINDS)
def test_background_turns_run_where_an_interactive_one_has_to_wait_for_their_room(
    kind: str,
) -> None:
    engine = StandIn(kind=kind, blocks=41, policies={"retention": {"hold_s": 0.0}})
    for number in range(3):
        tokens = range(number, number + 320)
        engine.add(f"agent{number}", tokens, 60, f"agent{number}", background=True)
    while len(engine.token_times_s) < 3:
        engine.step()
    engine.add("person", range(900, 1500), 4, "person")
    engine.drain()
    # Held, they would have kept it for 10 s.
    assert lasted_s(engine, "person") < 1.0
    assert not engine.wrong
    engine.require_no_leak()
