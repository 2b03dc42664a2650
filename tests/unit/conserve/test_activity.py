"""Which histories are active."""

from hypothesis import given
from hypothesis import strategies as st

from conserve.conversations.ledger import RECENT_S, Activity


@given(
    st.lists(
        st.tuples(st.sampled_from(["idle", "not_idle"]), st.sampled_from("abc"), st.floats(0, 20))
    )
)
def test_they_are_as_many_as_became_idle_lately(steps: list[tuple[str, str, float]]) -> None:
    activity, since_s, now_s = Activity(), dict[str, float](), 0.0
    for what, name, after_s in steps:
        now_s += after_s
        if what == "idle":
            activity.idle(name, now_s)
            since_s[name] = now_s
        else:
            activity.not_idle(name)
            since_s.pop(name, None)
        assert activity.acting(now_s) == sum(now_s - at_s < RECENT_S for at_s in since_s.values())


def test_nothing_is_kept_of_those_that_were_idle_for_long() -> None:
    activity = Activity()
    for number in range(1000):
        activity.idle(f"c{number}", float(number))
    assert len(activity._idle_s) == RECENT_S
