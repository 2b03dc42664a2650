"""What `serve` and `demo` do with an application: how it ends, and what its user is told."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from conserve.settings import load
from conserve_cli import launching
from conserve_cli.launching import laid_out, launched

_HANDLED = (signal.SIGTERM, signal.SIGHUP)


class _Application:
    """Stands in for an application that comes up at once."""

    entered: int = 0
    left: int = 0

    def __init__(self, arguments: list[str], log: Path) -> None:
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
    monkeypatch.setattr("deployments.start_checks.busy_ports", lambda settings: ())
    tls = {"tls.cert_file": str(tmp_path / "tls.crt"), "tls.key_file": str(tmp_path / "tls.key")}
    with pytest.raises(typer.Exit) as ended:
        laid_out(load({"device": "cpu", **tls}))
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tls.cert_file: cannot read {tmp_path}/tls.crt")


def test_a_host_that_is_every_address_is_reached_on_loopback(
    application: type[_Application], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load({"host": "0.0.0.0", "port": "8123", "unauthenticated": "true"})
    with launched(settings, [], tmp_path / "log") as (_, url):
        assert url == "http://127.0.0.1:8123"
    assert (application.entered, application.left) == (1, 1)
    said = capsys.readouterr().out
    assert "loading vLLM" in said
    assert re.search(r"Serving after 0\.\d s: loading vLLM 12\.3, warming up 1\.0 ", said)


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
