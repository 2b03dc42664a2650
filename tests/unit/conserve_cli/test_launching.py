"""What `serve` and `demo` do with an application: how it ends, and what its user is told."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from conserve.launch import Launch
from conserve.settings import load
from conserve_cli import launching
from conserve_cli.launching import laid_out, launched, left_behind, wait_or_drain
from conserve_cli.output import ended_by_signals
from conserve_cli.surroundings import own_folder
from tests.engines.processes import kill

_HANDLED = (signal.SIGTERM, signal.SIGHUP)


class _Application:
    """Stands in for an application that comes up at once."""

    entered: int = 0
    left: int = 0

    def __init__(self, arguments: list[str], log: Path, command: list[str]) -> None:
        pass

    def __enter__(self) -> "_Application":
        type(self).entered += 1
        return self

    def __exit__(self, *error: object) -> None:
        type(self).left += 1

    def wait_until_serving(self, url: str, *engines: int, **options: Any) -> dict[str, float]:
        options["on_progress"]("loading vLLM")
        return {"loading vLLM": 12.345, "warming up": 1.0}


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Application]]:
    """An application that starts, and the check that handlers of signals are put back."""

    class Application(_Application):
        pass

    monkeypatch.setattr(launching, "Launch", Application)
    before = [signal.getsignal(number) for number in _HANDLED]
    yield Application
    assert [signal.getsignal(number) for number in _HANDLED] == before


def test_a_bad_certificate_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("conserve_cli.gpu_plan.busy_ports", lambda settings: ())
    tls = {"tls.cert_file": str(tmp_path / "tls.crt"), "tls.key_file": str(tmp_path / "tls.key")}
    with pytest.raises(typer.Exit) as ended:
        laid_out(load({"device": "cpu", **tls}))
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tls.cert_file: cannot read {tmp_path}/tls.crt")


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")],
)
def test_the_application_is_reached_on_loopback_and_without_proxies(
    application: type[_Application],
    host: str,
    reached: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    settings = load({"host": host, "port": "8123", "unauthenticated": "true"})
    with launched(settings, [], tmp_path / "log") as (_, url):
        assert url == f"http://{reached}:8123"
        assert not [name for name in os.environ if name.lower().endswith("_proxy")]
    assert (application.entered, application.left) == (1, 1)
    said = capsys.readouterr().out
    assert "loading vLLM" in said
    assert re.search(r"Serving after \d+\.\d s: loading vLLM 12\.3, warming up 1\.0 ", said)


def test_logs_of_the_last_few_runs_are_kept_in_a_folder_of_the_user(
    application: type[_Application], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = own_folder()
    folder.chmod(0o777)
    for end in ("1-1.log", "1-1.log.1", "2-1.log", "3-1.log", "4-1.log", "5-1.log", "6-1.log"):
        (folder / f"serve-2026010{end}").touch()
    with launched(load({}), [], None):
        *old, new = sorted(folder.iterdir())
    assert [log.name[13:] for log in old] == ["3-1.log", "4-1.log", "5-1.log", "6-1.log"]
    assert new.name.endswith(f"-{os.getpid()}.log")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [signal.SIGINT, *_HANDLED])
def test_a_signal_stops_the_application_and_the_status_is_130(
    application: type[_Application],
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, launched(load({}), [], tmp_path / "log"):
        signal.raise_signal(number)
    assert ended.value.exit_code == 130
    assert (application.entered, application.left) == (1, 1)
    assert "Stopping." in capsys.readouterr().out


# It notes that it was told to end, and does so once its "turn" has finished.
_CHILD = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1], "told").touch()
    time.sleep(float(sys.argv[2]))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], "up").touch()
while True:
    time.sleep(0.05)
"""


def _child(folder: Path, turn_s: float) -> Launch:
    command = [sys.executable, "-c", _CHILD, str(folder), str(turn_s)]
    return Launch([], folder / "log", command=command)


def _signals(folder: Path, *after: str) -> None:
    """Send this process a SIGTERM once each of these files is there, and it is waited for."""
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        while signal.getsignal(signal.SIGTERM) is before:
            time.sleep(0.02)
        for name in after:
            while not (folder / name).exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()


def test_a_turn_is_finished_at_sigterm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ended_by_signals(), _child(tmp_path, turn_s=1.0) as application:
        _signals(tmp_path, "up")
        assert wait_or_drain(application, 5.0) == 0
        assert not application.running
    assert (tmp_path / "told").exists()
    assert "for 5 s at most" in capsys.readouterr().out


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with ended_by_signals(), _child(tmp_path, turn_s=60.0) as application:
        _signals(tmp_path, "up", "told")
        with pytest.raises(KeyboardInterrupt):
            wait_or_drain(application, 60.0)
        assert not application.running
    assert time.monotonic() - started_s < 30


def test_processes_of_a_launcher_that_has_ended_are_found() -> None:
    with subprocess.Popen("true") as launcher:
        pass
    command, pids = ["sleep", "600"], [launcher.pid, os.getpid()]
    left, own = (subprocess.Popen(command, env={"CONSERVE_LAUNCHER": str(pid)}) for pid in pids)
    found = left_behind()
    for one in (left, own):
        kill(one.pid)
    assert (found.get(left.pid), found.get(own.pid)) == ("sleep", None)
