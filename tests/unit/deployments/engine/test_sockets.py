"""An engine's sockets: their names are there while it starts, and what is connected stays so."""

import contextlib
import os
import stat
from pathlib import Path

import pytest
import zmq
from vllm.utils.network_utils import get_open_zmq_ipc_path

from deployments.engine.core import unnamed_afterwards


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
