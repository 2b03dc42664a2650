"""``conserve doctor`` and its exit status."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from typer.testing import CliRunner

from conserve_cli.main import cli
from tests.unit.conserve_cli.doctor.here import Here


def test_the_command_exits_with_1_when_something_is_wrong(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sound = CliRunner().invoke(cli, ["doctor"])
    assert sound.exit_code == 0, sound.output
    here.shm_bytes = 0
    sick = CliRunner().invoke(cli, ["doctor", "decoders=1"])
    assert sick.exit_code == 1
    (wrong,) = [one for one in sick.output.splitlines() if one.startswith("wrong")]
    assert "shared memory" in wrong
    assert "To do: give the container more" in wrong


class _Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def _listener(kind: str) -> Iterator[str]:
    """Something that is no Ray, and its address."""
    if kind == "a web server":
        web = ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{web.server_port}"
        web.shutdown()
        web.server_close()
    elif kind == "another gRPC server":
        other = grpc.server(ThreadPoolExecutor(1))
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        yield f"127.0.0.1:{port}"
        other.stop(None)
    else:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            yield f"127.0.0.1:{silent.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["a web server", "another gRPC server", "a silent one"])
def test_what_is_no_ray_is_told_in_one_line(kind: str) -> None:
    """Ray itself would try for minutes."""
    with _listener(kind) as address:
        began_s = time.monotonic()
        refused = CliRunner().invoke(cli, ["doctor", "--address", address])
        took_s = time.monotonic() - began_s
    assert refused.exit_code == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line == (
        f"--address: no usable Ray at {address}: what listens there is not a Ray cluster's head"
    )
    assert took_s < 30


@pytest.mark.parametrize(
    "address", ["head", "ray://127.0.0.1:10001", "http://head:8265", "head:66000", ":6379"]
)
def test_what_is_no_address_is_told_at_once(address: str) -> None:
    refused = CliRunner().invoke(cli, ["doctor", "--address", address])
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"--address: no usable Ray at {address}: give HOST:PORT of its head (Ray's own port is "
        "6379), or auto\n"
    )
