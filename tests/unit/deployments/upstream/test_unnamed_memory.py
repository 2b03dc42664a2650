"""Memory that processes share: found by name while its maker lives, in no folder."""

import os
from collections.abc import Iterator

import pytest

from deployments.upstream.unnamed_memory import UnnamedMemory, reserve

_SIZE = 100_000


@pytest.fixture
def memory() -> Iterator[UnnamedMemory]:
    memory = UnnamedMemory(create=True, size=_SIZE)
    yield memory
    memory.close()


def test_one_makes_it_and_others_open_it(memory: UnnamedMemory) -> None:
    assert memory.buf is not None
    assert memory.size == _SIZE
    assert bytes(memory.buf) == bytes(_SIZE)
    other = UnnamedMemory(memory.name)
    assert other.buf is not None
    assert (other.name, other.size) == (memory.name, _SIZE)
    memory.buf[7] = 42
    assert other.buf[7] == 42
    # It stays for the other one.
    memory.unlink()
    memory.close()
    memory.close()
    other.buf[7] += 1
    assert other.buf[7] == 43
    other.close()


def test_there_is_none_of_a_name_that_nobody_has(memory: UnnamedMemory) -> None:
    """vLLM expects this error, of a reader on another node."""
    memory.close()
    for name in (memory.name, "psm_other", "/proc/4194305/fd/3"):
        with pytest.raises(FileNotFoundError):
            UnnamedMemory(name)


def test_a_name_may_be_known_before_the_memory() -> None:
    name = reserve()
    with pytest.raises(FileNotFoundError, match="was not made yet"):
        UnnamedMemory(name)
    made = UnnamedMemory(name, create=True, size=_SIZE)
    assert (made.name, made.size) == (name, _SIZE)
    # Its name is the process's, not the object's.
    made.close()
    opened = UnnamedMemory(name)
    assert opened.size == _SIZE
    opened.close()
    os.close(int(name.rpartition("/")[2]))
