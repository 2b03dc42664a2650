"""SM slots on a GPU, without an engine: who runs where, what a slot is worth, what moving costs."""

from typing import Any

import pytest

from tests.acceptance.gpu.card import printed_by
from tests.engines.streams import Put

pytestmark = pytest.mark.step("slots")


def on_slots(*check: str) -> Any:
    """What `tests.acceptance.gpu.on_slots` finds, in a process of its own."""
    return printed_by("-m", "tests.acceptance.gpu.on_slots", *check)


def test_the_two_sides_of_each_size_share_no_sm(machine_alone: None, figure: Put) -> None:
    """By ``%smid``; and every SM that a context has is used."""
    found = on_slots("sides")
    for row in found["rows"]:
        figure(f"SMs that decoding had, of {row['decode'][0]}", row["decode"][1])
        figure(f"SMs that were left for prefills, of {row['prefill'][0]}", row["prefill"][1])
        assert row["shared"] == 0
        assert row["decode"][0] == row["decode"][1]
        assert row["prefill"][0] == row["prefill"][1]
    assert found["rows"][-1]["decode"][1] == found["sms"]


def test_a_lease_is_the_same_sms_in_every_process(machine_alone: None) -> None:
    """Asked twice, and beside another lease: only what it says which units it has can part them."""
    one, again, other = (
        on_slots("lease", *units) for units in (("0", "2"), ("0", "2"), ("2", "4"))
    )
    assert one["ran_on"] == again["ran_on"]
    assert len(one["ran_on"]) == one["leased"] > 0
    assert set(one["ran_on"]).isdisjoint(other["ran_on"])


def test_a_graph_keeps_to_the_sms_that_it_was_captured_on(machine_alone: None, figure: Put) -> None:
    """Wherever it is launched."""
    found = on_slots("graph")
    figure("SMs that a graph ran on", found["allowed"])
    assert found["outside"] == {"own": 0, "other": 0, "plain": 0}


def test_what_moving_the_border_costs(machine_alone: None, figure: Put) -> None:
    """The paper's is below 50 us."""
    found = on_slots("rebinding")
    figure("moving the border, median", found["median_us"], "us")
    figure("moving the border, p99", found["p99_us"], "us")
    figure("making the contexts", found["contexts_s"], "s")
    figure("memory of the contexts", found["contexts_mib"], "MiB")
    assert found["median_us"] > 0


def test_a_decode_step_beside_a_prefill(machine_alone: None, figure: Put) -> None:
    """In one process: on plain streams, on one of priority, on slots."""
    for name, row in on_slots("beside").items():
        for what, found_ms in row.items():
            figure(f"a decode step beside a prefill, {name}, {what}", found_ms, "ms")
