"""The index finds the histories that a tail continues."""

import time

from hypothesis import example, given
from hypothesis import strategies as st

from conserve.recognition import TailIndex
from tests.unit.conserve.recognition.messages import never_busy


def test_a_free_owner_is_preferred_the_oldest_first() -> None:
    index = TailIndex()
    for id in "abc":
        index.add(id, [b"1"])
    assert index.match([b"1"], {"a"}.__contains__) == "b"
    assert index.match([b"1"], never_busy) == "a"
    assert index.match([b"1"], {"a", "b"}.__contains__) == "c"
    assert index.match([b"1"], lambda _: True) is None


IDS = st.sampled_from("abcd")
TAILS = st.lists(st.sampled_from([b"1", b"2", b"3"]), max_size=3)


@given(st.lists(st.tuples(IDS, TAILS), max_size=30), TAILS, st.sets(IDS))
# Nothing shorter is taken where the longest known beginning's are all busy.
@example([("b", [b"1"]), ("a", [b"2"]), ("c", [b"2"])], [b"3", b"2", b"1"], {"a", "c"})
def test_the_index_agrees_with_a_plain_search(
    steps: list[tuple[str, list[bytes]]], candidates: list[bytes], busy: set[str]
) -> None:
    index = TailIndex()
    tails: dict[str, list[bytes]] = {}
    for id, digests in steps:
        index.discard(id, tails.get(id, ()))
        tails[id] = digests
        index.add(id, digests)
        owners: set[str] = set()
        for digest in candidates:
            owners = {one for one, its in tails.items() if digest in its}
            if owners:
                break
        found = index.match(candidates, busy.__contains__)
        assert found in (owners - busy or [None])


def test_100_000_equal_conversations_are_no_burden() -> None:
    index = TailIndex()
    many = 100_000
    started = time.perf_counter()
    for n in range(many):
        index.add(str(n), [b"same"])
    running: set[str] = set()
    for n in range(many):
        id = index.match([b"same"], running.__contains__)
        assert id is not None
        running.add(id)
        if n % 2:
            index.discard(id, [b"same"])
            index.add(id, [b"moved on %d" % n])
            running.remove(id)
    for n in range(many):
        index.discard(str(n), [b"same"])
    assert index.match([b"same"], never_busy) is None
    # About 0.5 s; were a step linear in the owners, minutes.
    assert time.perf_counter() - started < 10
