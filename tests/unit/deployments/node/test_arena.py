"""The memory that a node's engines share: what is read is what was written, whoever dies."""

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.node.arena import _HEAD, Arena, ArenaError, make_arena

ROOM = 64 * 1024


def key_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def read(arena: Arena, name: object) -> bytes | None:
    return arena.get(key_of(name))


def data_of(name: object, length: int) -> bytes:
    return random.Random(str(name)).randbytes(length)


@pytest.fixture
def path() -> Iterator[str]:
    made = make_arena(ROOM)
    yield made
    os.close(int(made.rpartition("/")[2]))


def test_what_one_process_view_writes_another_reads(path: str) -> None:
    one, other = Arena(path), Arena(path)
    assert read(other, "a") is None
    assert one.put(key_of("a"), b"hello")
    assert read(other, "a") == b"hello"
    # It is written once.
    assert other.put(key_of("a"), b"other")
    assert read(one, "a") == b"hello"
    assert one.counts() == other.counts() == (2, 2)
    # To look for it is not to find it.
    assert [other.has(key_of(name)) for name in "ab"] == [True, False]
    assert other.counts() == (2, 2)


def test_what_is_too_large_is_not_kept(path: str) -> None:
    one = Arena(path)
    assert not one.put(key_of("a"), bytes(ROOM // 3))
    assert read(one, "a") is None
    assert one.put(key_of("b"), bytes(ROOM // 5))


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 30), st.integers(0, ROOM // 5), st.booleans())))
def test_the_newest_are_there_and_nothing_else_is_ever_read(
    steps: list[tuple[int, int, bool]],
) -> None:
    made = make_arena(ROOM)
    writers, reader = [Arena(made), Arena(made)], Arena(made)
    lengths: dict[int, int] = {}
    for name, length, which in steps:
        if read(writers[which], name) is None:
            lengths[name] = length
        assert writers[which].put(key_of(name), data_of((name, length), length))
        late = reader if which else writers[0]
        for known, size in lengths.items():
            assert read(late, known) in (None, data_of((known, size), size))
        assert read(late, name) is not None
    for one in (*writers, reader):
        os.close(one._file)
    os.close(int(made.rpartition("/")[2]))


def _write_for_ever(path: str, seed: int) -> None:
    arena, rng = Arena(path), random.Random(seed)
    while True:
        name = rng.randrange(10**9)
        arena.put(key_of(name), data_of(name, name % 5000))


def test_writers_that_are_killed_leave_nothing_half_written(path: str) -> None:
    context = multiprocessing.get_context("fork")
    arena, seen = Arena(path), 0
    for seed in range(8):
        writers = [context.Process(target=_write_for_ever, args=(path, seed + n)) for n in (0, 50)]
        for writer in writers:
            writer.start()
        ends_s = time.monotonic() + 0.1
        while time.monotonic() < ends_s:
            for known in [key_of(0), *arena._known]:
                arena.get(known)
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        for rng in (random.Random(seed), random.Random(seed + 50)):
            for name in (rng.randrange(10**9) for _ in range(20_000)):
                found = read(arena, name)
                assert found in (None, data_of(name, name % 5000))
                seen += found is not None
        # The killed processes hold no lock.
        assert arena.put(key_of(("after", seed)), b"x")
        assert read(arena, ("after", seed)) == b"x"
    assert seen > 0


class _CountsFirst(Arena):
    """Writes as another processor may be shown it: the counts first, and the data behind them."""

    counted = threading.Event()

    def _write(self, at: int, size: int, key: bytes, data: bytes) -> None:
        super()._write(at, size, key, bytes(len(data)))
        self.counted.set()
        time.sleep(0.05)
        begin = self._place(at) + _HEAD.size
        self._map[begin : begin + len(data)] = data


def test_a_record_is_whole_in_whatever_order_memory_shows_it(path: str) -> None:
    writer, reader = _CountsFirst(path), Arena(path)
    length = ROOM // 8
    for number in range(10):
        data = data_of(number, length)
        writer.counted.clear()
        writing = threading.Thread(target=writer.put, args=(key_of(number), data))
        writing.start()
        assert writer.counted.wait(30)
        for known in range(number + 1):
            assert read(reader, known) in (None, data_of(known, length))
        writing.join()
        assert read(reader, number) == data


def test_a_process_that_is_stopped_while_it_writes_stops_no_other(path: str) -> None:
    stopped, other = Arena(path), Arena(path)
    assert other.put(key_of("a"), b"hello")
    with stopped._locked():
        assert read(other, "a") is None
        other.put(key_of("b"), b"more")
    # It has waited once, and does not wait again for a while.
    assert read(other, "a") is None
    other._paused_until_s = 0.0
    assert read(other, "a") == b"hello"
    assert read(other, "b") is None


def test_one_that_does_not_wait_finds_nothing_while_another_writes(path: str) -> None:
    writing, other = Arena(path), Arena(path, waits=False)
    assert writing.put(key_of("a"), b"hello")
    with writing._locked():
        assert not other.has(key_of("a"))
    assert other.has(key_of("a"))


def test_memory_that_is_gone_is_told(path: str) -> None:
    with pytest.raises(ArenaError, match="cannot be opened"):
        Arena(f"/proc/{os.getpid()}/fd/9999")
