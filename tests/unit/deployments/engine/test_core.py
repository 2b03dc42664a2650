"""An engine's core: what its process loads first, memory that it leaves alone, its sockets."""

import contextlib
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import zmq
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_open_zmq_ipc_path

from deployments.engine import core
from deployments.engine.core import allocate_untouched, core_loads_first, unnamed_afterwards
from tests.unit.deployments.engine import loaded_first

_SIZE = 2**28


def told_by_a_process(loads: ModuleType, tell: Callable[[Connection], None]) -> str:
    """Return what a spawned process says that loads a module first."""
    context = multiprocessing.get_context("spawn")
    with core_loads_first(loads):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=tell, args=(sender,))
        child.start()
    told: str = receiver.recv()
    child.join()
    return told


def test_a_spawned_process_loads_the_module_first() -> None:
    main = sys.modules["__main__"]
    before = main.__spec__
    assert told_by_a_process(loaded_first, loaded_first.tell) == "__mp_main__"
    assert main.__spec__ is before


def test_memory_reads_as_zeros_and_is_taken_when_it_is_written() -> None:
    def allocate(elements: int) -> torch.Tensor:
        return torch.zeros(elements, dtype=torch.int8, device=torch.device("cpu"))

    process, zeros = psutil.Process(), torch.zeros
    before_bytes = process.memory_info().rss
    space = allocate_untouched(allocate)(_SIZE)
    assert process.memory_info().rss < before_bytes + _SIZE / 2
    assert torch.zeros is zeros
    assert space.shape == (_SIZE,)
    part = space.view(torch.float32).view(-1, 1024)
    part[7] = 1.5
    assert space.view(torch.float32)[7 * 1024 : 8 * 1024].sum() == 1.5 * 1024
    assert part[6].count_nonzero() == part[8].count_nonzero() == 0
    space.fill_(1)
    assert process.memory_info().rss >= before_bytes + _SIZE * 0.9


def test_what_fails_leaves_pytorch_as_it_was() -> None:
    def fails() -> None:
        raise MemoryError

    zeros = torch.zeros
    with pytest.raises(MemoryError):
        allocate_untouched(fails)()
    assert torch.zeros is zeros


def test_a_core_allocates_its_kv_space_so() -> None:
    ours = current_platform.is_cpu()
    told = told_by_a_process(core, loaded_first.tell_who_allocates)
    assert told == ("__mp_main__" if ours else "vllm.v1.worker.utils")


def test_vllm_makes_its_kv_space_there() -> None:
    """The function that `core` replaces in vLLM is there, and makes the space."""
    from vllm.v1.worker import gpu_model_runner, utils

    assert gpu_model_runner.allocate_kv_cache is utils.allocate_kv_cache
    names: Any = utils.allocate_kv_cache.__code__.co_names
    assert "zeros" in names


def test_connections_outlive_the_name() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        with unnamed_afterwards():
            address = get_open_zmq_ipc_path()
            one.bind(address)
            two.connect(address)
            two.send(b"before")
            assert one.recv() == b"before"
            path = Path(address.removeprefix("ipc://"))
            assert path.is_socket()
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not path.parent.exists()
        for sender, receiver in ((one, two), (two, one)):
            sender.send(b"after")
            assert receiver.recv() == b"after"


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_the_folder_is_the_engines_own(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "VLLM_RPC_BASE_PATH"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with contextlib.suppress(RuntimeError), unnamed_afterwards():
        folder = Path(os.environ[name])
        (folder / "socket").touch()
        raise RuntimeError("the engine does not start")
    assert not folder.exists()
    assert os.environ.get(name) == before
