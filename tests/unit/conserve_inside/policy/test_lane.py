"""Calls that are prefilled in the lane, in steps, or wait for the lane."""

from conserve_inside.policy import PrefillLane


def route(
    lane: PrefillLane,
    name: str,
    missing_tokens: int = 1_000,
    decoding: bool = True,
    now_s: float = 0.0,
) -> str:
    return lane.route(name, missing_tokens, 256, decoding, now_s)


def test_the_lane_is_for_what_does_not_fit_into_a_step_beside_decodes() -> None:
    lane = PrefillLane()
    assert route(lane, "a", 256) == "inline"
    assert route(lane, "a", 257) == "lane"
    assert route(lane, "a", 257, decoding=False) == "inline"


def test_the_wait_and_the_queue_are_bounded() -> None:
    lane = PrefillLane(longest_wait_s=2.0, most_waiting=2)
    lane.takes("a", 999)
    assert [route(lane, name, now_s=10.0) for name in "bcd"] == ["wait", "wait", "inline"]
    lane.forget("c")
    assert route(lane, "d", now_s=11.0) == "wait"
    assert route(lane, "b", now_s=11.9) == "wait"
    # Also if there is no room for it at once.
    assert [route(lane, "b", now_s=now_s) for now_s in (12.0, 12.1)] == ["inline", "inline"]
    # Without decodes none waits.
    assert route(lane, "d", decoding=False, now_s=11.0) == "inline"
    assert lane.waiting == 1


def test_a_prefill_that_is_cut_leaves_the_lane_and_counts_as_none() -> None:
    lane = PrefillLane()
    lane.takes("a", 999)
    assert route(lane, "b") == "wait"
    lane.ends("a", "cut")
    assert route(lane, "b") == "lane"
    assert (lane.done, lane.failed) == (0, 0)
