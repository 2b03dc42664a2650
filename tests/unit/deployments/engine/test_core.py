"""An engine's core: what its process loads first, and its sockets."""

import contextlib
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest
import zmq
from vllm.utils.network_utils import get_open_zmq_ipc_path

from deployments.engine.core import core_loads_first, unnamed_afterwards
from tests.unit.deployments.engine import loaded_first


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
