"""SM slots on a GPU, without an engine: who runs where, what a slot is worth, what moving costs."""

import json
import subprocess
import sys
from typing import Any

from tests.checkout import ROOT
from tests.engines.gpu.card import NEEDS_GPU, seen

pytestmark = NEEDS_GPU


def on_slots(*check: str) -> dict[str, Any]:
    """What `tests.engines.gpu.on_slots` finds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.gpu.on_slots", *check],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_two_sides_of_each_size_share_no_sm(machine_alone: None) -> None:
    """By ``%smid``; and every SM that a context has is used."""
    found = on_slots("sides")
    for row in found["rows"]:
        seen.info("of %d SMs: %s", found["sms"], row)
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


def test_a_graph_keeps_to_the_sms_that_it_was_captured_on(machine_alone: None) -> None:
    """Wherever it is launched."""
    found = on_slots("graph")
    seen.info("graph: %s", found)
    assert found["outside"] == {"own": 0, "other": 0, "plain": 0}


def test_what_a_slot_is_worth(machine_alone: None) -> None:
    """A GEMM of 8,192 tokens and one of 16, by SMs; printed."""
    rows = on_slots("gemm")["rows"]
    for row in rows:
        seen.info("%(sms)d SMs: prefill %(prefill).3f ms, decode %(decode).3f ms", row)
    assert len(rows) > 1


def test_what_moving_the_border_costs(machine_alone: None) -> None:
    """The paper's is below 50 us; printed, with what the contexts take."""
    found = on_slots("rebinding")
    seen.info("rebinding: %s", found)
    assert found["median_us"] > 0


def test_a_decode_step_beside_a_prefill(machine_alone: None) -> None:
    """In one process: on plain streams, on one of priority, on slots; printed."""
    for name, row in on_slots("beside").items():
        seen.info("%s: decode step %.2f ms at the median, %.2f at p95", name, *row.values())
