"""Each turn's end says how long it has waited in the engine, and what for."""

from typing import Any

import pytest

from conserve.wire import engine_told
from tests.unit.conserve_inside.scheduler.stand_in import StandIn


def waited(engine: StandIn, name: str) -> tuple[float | None, str | None]:
    return engine_told(engine.said[name])[:2]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_num_seqs": 1, "blocks": 200}, "place"),
        # Six blocks, of which the first one has five, and one to grow into.
        ({"max_num_seqs": 4, "blocks": 7}, "room"),
    ],
)
def test_who_waits_is_told_what_for(kind: str, limits: dict[str, Any], reason: str) -> None:
    engine = StandIn(kind=kind, step_s=0.02, **limits)
    engine.add("first", range(160), 30, "first")
    engine.step()
    engine.add("second", range(1, 161), 4, "second")
    began_s = engine.now_s
    engine.drain()
    first_s, first_for = waited(engine, "first")
    assert first_s == 0.0
    assert first_for is None
    second_s, second_for = waited(engine, "second")
    assert second_for == reason
    assert second_s is not None
    # What is left is its own: a prompt and four tokens.
    took_s = engine.token_times_s["second"][0] - began_s
    assert 0.5 * took_s < second_s <= took_s
