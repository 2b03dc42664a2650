"""An application that is started where users start it, and ended without being asked."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.node.lmcache_server import is_free
from tests.checkout import ROOT
from tests.engines.applications import START_S
from tests.engines.processes import runs

_SETTINGS = ("prefillers=0", "decoders=1", "engine.dtype=float32", "lmcache.size_gb=0.5")
# A user without a name and a home, who may read this checkout and its Python.
_STRANGER = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
_STRANGER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
_NO_IPV6 = "ip link set lo up && echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 && exec $0 $@"
_PROXY = "http://127.0.0.1:9"
_PROXIES = {"http_proxy": _PROXY, "https_proxy": _PROXY, "all_proxy": "socks5://127.0.0.1:9"}
# Variables, which are not set where they are empty, and how it is started.
_PLACES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "no-home": ({"HOME": "/nonexistent"}, {"umask": 0o077}),
    # And beside another user's Ray, which has the folder `ray`.
    "no-account": (
        {"HOME": "", "USER": "", "LOGNAME": "", "LANG": "", "TMPDIR": "{folder}"},
        {"before": _STRANGER, "umask": 0},
    ),
    "locale": ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}),
    "temporary": ({"TMPDIR": "{folder}/a long folder, with \u00fc and spaces in its name"}, {}),
    "proxies": (_PROXIES, {"host": "127.0.0.2"}),
    "no-ipv6": ({}, {"before": ["unshare", "--net", "sh", "-c", _NO_IPV6]}),
}
# What is told to end, and within which time; otherwise it is `conserve serve`, killed.
_KILLED = ("conserve_cli.main", signal.SIGKILL, 10.0)
_ENDS = {
    "locale": ("conserve_cli.run", signal.SIGKILL, 10.0),
    "temporary": ("conserve_cli.main", signal.SIGHUP, 60.0),
}
_MODULES = ("deployments/__init__", "client/__init__", "conserve", "secrets", "queue", "typing")


@contextmanager
def _served(
    variables: dict[str, str],
    *settings: str,
    before: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    umask: int = -1,
) -> Iterator[psutil.Popen]:
    """Run `conserve serve` in a folder with modules that fail; yield it once it is ready."""
    # Short, for sockets; and a stranger does not reach pytest's folders.
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="p"))
    folder.chmod(0o777)
    (folder / "ray").mkdir()
    for name in _MODULES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("raise ImportError(__file__)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {name: value.format(folder=folder) for name, value in variables.items()}
    Path(environment.get("TMPDIR", folder)).mkdir(exist_ok=True)
    said = folder / "said"
    with said.open("w") as output:
        process = psutil.Popen(
            [*before, sys.executable, "-P", "-m", "conserve_cli.main", "serve",
             *_SETTINGS, f"host={host}", f"port={port}", *settings],
            env={name: value for name, value in environment.items() if value},
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, umask=umask,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + START_S
        while "Ready at " not in (text := said.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline_s, text
            time.sleep(0.5)
        yield process
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


def _answers(host: str, port: int) -> bool:
    body = {"model": "conserve-embedded", "prompt": "hello", "max_tokens": 4}
    with httpx.Client(trust_env=False, timeout=120) as client:
        return client.post(f"http://{host}:{port}/v1/completions", json=body).is_success


def _end(serve: psutil.Popen, named: str, number: signal.Signals, within_s: float) -> None:
    """Send a signal to one of its processes, and see all of them end."""
    started = [serve, *serve.children(recursive=True)]
    assert len(started) > 10
    next(one for one in started if named in one.cmdline()).send_signal(number)
    deadline_s = time.monotonic() + within_s
    while left := [one for one in started if runs(one)]:
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize("name", _PLACES)
def test_it_serves_there_and_leaves_no_process(machine_alone: None, name: str) -> None:
    variables, how = _PLACES[name]
    if (before := how.get("before")) and (os.geteuid() or not shutil.which(before[0])):
        pytest.skip(f"needs root, and {before[0]}")
    host, files = how.get("host", "127.0.0.1"), set(Path("/dev/shm").iterdir())
    with ExitStack() as stack:
        # Ports of another user's Ray.
        for port in (6379, 10001, 52365):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        serve = stack.enter_context(_served(variables, **how))
        # In a network of its own it cannot be asked.
        assert name == "no-ipv6" or _answers(host, 8000)
        _end(serve, *_ENDS.get(name, _KILLED))
        assert is_free(host, 8000)
    assert set(Path("/dev/shm").iterdir()) == files


def test_two_serve_on_one_machine_and_one_outlives_the_other(machine_alone: None) -> None:
    with _served({}) as first, _served({}, "lmcache.port=7620", port=8001):
        _end(first, *_KILLED)
        assert is_free("127.0.0.1", 8000)
        assert _answers("127.0.0.1", 8001)
