import pytest

from conserve_inside.policy import PrefillLane


def route(
    lane: PrefillLane,
    name: str,
    missing_tokens: int = 1_000,
    decoding: bool = True,
    now_s: float = 0.0,
) -> str:
    return lane.route(name, missing_tokens, 256, decoding, now_s)


def test_what_fits_into_a_step_stays_in_it() -> None:
    lane = PrefillLane()
    assert route(lane, "a", 256) == "inline"
    assert route(lane, "a", 257) == "lane"


def test_where_nobody_decodes_there_is_nobody_to_keep_it_from() -> None:
    assert route(PrefillLane(), "a", decoding=False) == "inline"


def test_one_at_a_time() -> None:
    lane = PrefillLane()
    lane.takes("a", 999)
    assert route(lane, "b") == "wait"
    assert lane.waiting == 1
    with pytest.raises(ValueError, match="b cannot enter the lane: a is in it"):
        lane.takes("b", 1)
    lane.ends("a", "done")
    assert route(lane, "b") == "lane"
    lane.takes("b", 999)
    assert (lane.waiting, lane.current, lane.done) == (0, "b", 1)


def test_nobody_waits_for_ever() -> None:
    lane = PrefillLane(longest_wait_s=2.0)
    lane.takes("a", 999)
    assert route(lane, "b", now_s=10.0) == "wait"
    assert route(lane, "b", now_s=11.9) == "wait"
    assert route(lane, "b", now_s=12.0) == "inline"
    # Also if there is no room for it at once.
    assert route(lane, "b", now_s=12.1) == "inline"


def test_the_queue_has_a_length() -> None:
    lane = PrefillLane(most_waiting=2)
    lane.takes("a", 999)
    assert [route(lane, name) for name in "bcd"] == ["wait", "wait", "inline"]
    lane.forget("b")
    assert route(lane, "d") == "wait"


def test_who_waits_runs_inline_once_nobody_decodes() -> None:
    lane = PrefillLane()
    lane.takes("a", 999)
    assert route(lane, "b") == "wait"
    assert route(lane, "b", decoding=False) == "inline"
    assert lane.waiting == 0


def test_what_is_left_is_counted() -> None:
    lane = PrefillLane()
    lane.takes("a", 999)
    lane.computed("a", 256)
    assert (lane.current_tokens, lane.computed_tokens) == (743, 256)
    lane.ends("a", "cut")
    assert (lane.current, lane.current_tokens, lane.done, lane.failed) == (None, 0, 0, 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"most_waiting": -1}, "most_waiting: -1"), ({"longest_wait_s": -1.0}, "longest_wait_s: -1")],
)
def test_bad_settings_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrefillLane(**settings)  # type: ignore[arg-type]
