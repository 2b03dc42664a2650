"""A peer under a process of its own: what it says, and that it ends with whoever started it."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from conserve_lab.peers import Options, PeerUnavailable
from conserve_lab.peers.apart import start_apart
from tests.checkout import ROOT

# The process as it is, with a peer that only notes when it starts and stops.
_NOTED = """
    import contextlib, sys
    from pathlib import Path
    from conserve_lab.peers import apart, Peer

    @contextlib.contextmanager
    def start(name, options, tell):
        tell(f"starting on {options.port} with {options.cores}")
        try:
            yield Peer(name, "http://127.0.0.1:1", "model", None, True, {})
        finally:
            Path(sys.argv[2]).write_text("stopped")

    apart.start = start
    apart.main()
"""


def _said(child: subprocess.Popen[str]) -> dict[str, object]:
    assert child.stdout is not None
    found: dict[str, object] = json.loads(child.stdout.readline())
    return found


def _close(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()


def _terminate(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGINT)


@pytest.mark.parametrize("end", [_close, _terminate])
def test_it_stops_when_its_caller_is_gone(
    tmp_path: Path, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    note = tmp_path / "note"
    core = min(os.sched_getaffinity(0))
    given = asdict(Options(engines=1, port=8123, cores=(core,), logs=tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_NOTED), "vllm", str(note)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        child.stdin.write(json.dumps({**given, "logs": str(tmp_path)}) + "\n")
        child.stdin.flush()
        assert _said(child) == {"progress": f"starting on 8123 with ({core},)"}
        assert "peer" in _said(child)
        assert not note.exists()
        end(child)
        assert child.wait(60) == 0
    assert note.read_text() == "stopped"


def test_why_a_peer_cannot_run_is_told() -> None:
    before = set(psutil.Process().children())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(PeerUnavailable, match=f"port {port} is in use"),
            start_apart("vllm", Options(engines=1, port=port), lambda text: None),
        ):
            pass
    assert set(psutil.Process().children()) == before
