"""``conserve power``, as an operator runs it, with the stand-in's GPUs."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conserve_cli.main import cli
from hetero.nvml import Nvml
from hetero.power import DIRECTORY_VARIABLE, Cap, PowerCaps
from tests.checkout import ROOT
from tests.nvml.standin import Machine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "power"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "power"


@pytest.fixture
def application(machine: Machine) -> Iterator[str]:
    """Answers as a router does: one decoder, on the first GPU."""
    body = json.dumps({"data": [{"id": "d", "gpus": [machine.gpus[0].id]}]}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/engines" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["power", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def limits(machine: Machine) -> list[int]:
    return [gpu.limit_mw // 1000 for gpu in machine.gpus]


def test_the_status_shows_limits_and_caps(machine: Machine, nvml: Nvml, folder: Path) -> None:
    machine.load(machine.gpus[1], 280)
    first = machine.gpus[0].id
    caps = PowerCaps(nvml, "somebody", folder)
    caps.apply(first, Cap(watts=200), {first})
    code, text = run("status")
    assert code == 0
    lines = text.splitlines()
    (capped,) = (line for line in lines if "somebody" in line)
    for part in ("0", "NVIDIA A40", "30", "200", "300", "100-300", f"process {os.getpid()}"):
        assert part in capped
    assert any("280" in line and "none" in line for line in lines)


def test_a_machine_without_a_driver_says_so(machine: Machine) -> None:
    machine.fail_to_open(9)
    code, text = run("status")
    assert code == 1
    assert "no NVIDIA driver" in text


def test_what_was_left_behind_is_restored(machine: Machine, nvml: Nvml, folder: Path) -> None:
    first = machine.gpus[0].id
    caps = PowerCaps(nvml, "somebody", folder)
    caps.apply(first, Cap(watts=200), {first})
    code, text = run("restore")
    assert "held" in text
    caps._locks.pop(first).close()  # As the kernel does when it dies.
    assert "left behind" in run("status")[1]
    code, text = run("restore")
    assert (code, limits(machine)) == (0, [300, 300])
    assert "restored" in text
    assert "nothing to restore" in run("restore")[1]
    caps = PowerCaps(nvml, "somebody", folder)
    caps.apply(first, Cap(watts=200), {first})
    caps._locks.pop(first).close()
    machine.gpus[0].denied = 1
    code, text = run("restore")
    assert code == 1
    assert "CAP_SYS_ADMIN" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["1", "--watts", "200"], "no replica of ConServe uses"),
        (["0", "--watts", "50"], "100 to 300 W"),
        (["0", "1", "--watts", "200"], "no replica of ConServe uses"),
        (["0"], "one of the two"),
        (["0", "--watts", "200", "--fraction", "0.5"], "one of the two"),
    ],
)
def test_what_is_refused_changes_nothing(
    machine: Machine, application: str, arguments: list[str], why: str
) -> None:
    code, text = run("apply", *arguments, "--url", application)
    assert code != 0
    assert why in text
    assert [gpu.set_calls for gpu in machine.gpus] == [0, 0]


def test_without_an_application_no_gpu_is_known_to_be_ours(machine: Machine) -> None:
    code, text = run("apply", "0", "--watts", "200", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "no ConServe application answers" in text
    assert machine.gpus[0].set_calls == 0


Started = subprocess.Popen[str]


@pytest.fixture
def start(machine: Machine, application: str) -> Iterator[Callable[[], Started]]:
    started: list[Started] = []

    def run() -> Started:
        command = [sys.executable, "-m", "conserve_cli.main", "power", "apply", "0"]
        process = subprocess.Popen(
            [*command, "--fraction", "0.667", "--url", application],
            cwd=ROOT,
            env=machine.environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert "200" in process.stdout.readline()
        assert limits(machine) == [200, 300]
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cap_by_hand_ends_with_its_command(
    machine: Machine, start: Callable[[], Started], number: signal.Signals
) -> None:
    process = start()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, limits(machine)) == (0, [300, 300])
    assert "restored" in output
