"""Ports that settings name, and processes that others can reach."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from conserve.settings import load
from conserve_cli.doctor.listeners import (
    check_listeners,
    check_ports,
    is_ours,
)
from deployments.messages import NodeCache
from deployments.node.lmcache_server import Address, LMCacheServer
from tests.unit.conserve_cli.doctor.here import SETTINGS, about, assert_finds, unwell

ROUTER, ENGINE = "ray::ServeReplica:default:Router", "ray::ServeReplica:default:decoder"
GCS = "/venv/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp"
LMCACHE = "python -m lmcache.cli.main server --host x"
# By the process's number.
COMMANDS = {
    7: ROUTER, 8: ENGINE, 9: GCS, 10: LMCACHE, 11: "VLLM::Worker", 12: "nginx", os.getpid(): GCS,
}  # fmt: skip


def listen(monkeypatch: pytest.MonkeyPatch, *listeners: tuple[int | None, str, int]) -> None:
    """Have these processes listen on addresses and ports, and no others."""
    connections = [
        SimpleNamespace(status="LISTEN", laddr=SimpleNamespace(ip=ip, port=port), pid=pid)
        for pid, ip, port in listeners
    ]

    def process(pid: int) -> Any:
        if pid not in COMMANDS:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(cmdline=COMMANDS[pid].split)

    monkeypatch.setattr(psutil, "net_connections", lambda kind: connections)
    monkeypatch.setattr(psutil, "Process", process)


def test_each_listener_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    listen(
        monkeypatch,
        (12, "0.0.0.0", 80), (13, "0.0.0.0", 81), (None, "0.0.0.0", 82), (9, "127.0.0.1", 83),
        (os.getpid(), "0.0.0.0", 84),
        (11, "192.0.2.1", 40000), (7, "0.0.0.0", 8000), (8, "192.0.2.1", 31000),
        (9, "::", 44217), (9, "0.0.0.0", 6379), (10, "192.0.2.1", 7610),
    )  # fmt: skip
    assert_finds(
        check_listeners(SETTINGS),
        ("warning", "router's ports", f"{ROUTER} (pid 7) listens on 0.0.0.0:8000, which others"),
        ("warning", "engine's ports", f"{ENGINE} (pid 8) listens on 192.0.2.1:31000, which"),
        ("warning", "Ray's ports", "gcs_server (pid 9) listens on 0.0.0.0:6379, [::]:44217, which"),
        ("warning", "LMCache's ports", "To do: set nodes=one: clients that reach it can run code"),
        ("warning", "vLLM's ports", "To do: set VLLM_HOST_IP=127.0.0.1 before Ray starts"),
    )
    listen(monkeypatch)
    assert [one.level for one in check_listeners(SETTINGS)] == ["ok"]


@pytest.mark.parametrize(
    ("host", "left"),
    [
        # Another port of the same process, and another address than the one that was asked for.
        ("0.0.0.0", "[::]:41000"),
        ("localhost", "0.0.0.0:8000, [::]:41000"),
        ("192.0.2.1", "0.0.0.0:8000, [::]:41000"),
        ("a.name", "0.0.0.0:8000, [::]:41000"),
    ],
)
def test_what_the_settings_ask_for_is_not_told(
    monkeypatch: pytest.MonkeyPatch, host: str, left: str
) -> None:
    asked = load({"host": host, "unauthenticated": True})
    listen(monkeypatch, (7, "0.0.0.0", 8000), (7, "::", 41000))
    assert_finds(check_listeners(asked), ("warning", "router's ports", f"listens on {left}, which"))
    listen(monkeypatch, (7, "0.0.0.0" if host == "0.0.0.0" else "192.0.2.1", 8000))
    assert len(unwell(check_listeners(asked))) == (host == "localhost")
    # They ask for no other port, and for no other process there.
    listen(monkeypatch, (7, "0.0.0.0", 41000))
    assert len(unwell(check_listeners(asked))) == 1
    listen(monkeypatch, (8, "0.0.0.0", 8000))
    assert len(unwell(check_listeners(asked))) == 1


def test_a_process_of_rays_on_this_machine(tmp_path: Path) -> None:
    """Listening on loopback and on all addresses; only the second is told, and not this process."""
    script = tmp_path / "ray" / "dashboard" / "agent.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import socket, time\n"
        "near, far = socket.create_server(('127.0.0.1', 0)), socket.create_server(('', 0))\n"
        "print(far.getsockname()[1], flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        found = about("Ray's ports", check_listeners(SETTINGS))
        (seen,) = [one for one in found if f"pid {process.pid}" in one]
        assert f"agent.py (pid {process.pid}) listens on 0.0.0.0:{port}, which others" in seen
    finally:
        process.kill()
        process.communicate()


# --- ports ----------------------------------------------------------------------------------------


def test_a_port_that_this_very_process_holds() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        settings = load({"port": port, "lmcache": {"port": 0}})
        held = f"(pid {os.getpid()}) listens there. To do: stop it, or set another port"
        assert_finds(check_ports(settings), ("wrong", "port", held))
        assert list(check_ports(settings, has_router=False)) == []
    (free,) = about("port", check_ports(settings))
    assert free == f"ok      port: 127.0.0.1:{port} is free, for router"


class Application(BaseHTTPRequestHandler):
    """A router that lists engines; what they found is different with each."""

    def do_GET(self) -> None:
        problems = ({"problem": "not found"}, {"problem": ""}, None)
        data = [{"id": str(id_), "cache_check": one} for id_, one in enumerate(problems)]
        self.send_response(200 if self.path == "/v1/engines" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [*data, {"id": "of another release"}]}).encode())


def test_caches_that_find_nothing_are_told_where_the_application_runs() -> None:
    with HTTPServer(("127.0.0.1", 0), Application) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = load({"port": server.server_port, "lmcache": {"port": 0}})
        first, second = about("cache", check_ports(settings))
        assert first.startswith("warning cache: 0: not found. To do: docs/reference/metrics.md")
        assert second == "ok      cache: 1 finds prompts that come again"
        assert about("cache", check_ports(settings, has_router=False)) == []
        server.shutdown()


@pytest.mark.parametrize(
    ("pid", "level", "fragment"),
    [
        (8, "ok", "ConServe's router is there already"),
        (12, "wrong", "for router: nginx (pid 12) listens there. To do: stop it, or set another"),
        (13, "wrong", "for router: another process listens there"),
    ],
)
def test_ports_that_others_have(
    monkeypatch: pytest.MonkeyPatch, pid: int | None, level: str, fragment: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listen(monkeypatch, (9, "127.0.0.1", port - 1), (pid, "127.0.0.1", port))
        (found,) = about("port", check_ports(load({"port": port, "lmcache": {"port": 0}})))
    assert found.startswith(level)
    assert fragment in found


def test_lmcaches_ports_are_checked_where_it_listens() -> None:
    one, several = (
        "".join(about("port", check_ports(load({"nodes": nodes})))) for nodes in ("one", "several")
    )
    assert "127.0.0.1:7610" in one
    assert "0.0.0.0:7610" in several
    assert "127.0.0.1:7611" in several


def test_the_servers_that_nodes_start_are_known_for_ours() -> None:
    """By their command lines, whether they share KV with other nodes or not."""
    address = Address("127.0.0.1", 7610, 7611)
    alone = LMCacheServer(2.0, 256, address).command()
    cache = NodeCache("id", "10.0.0.1", 7610, 20_000)
    sharing = LMCacheServer(2.0, 256, address, "http://127.0.0.1:1", _cache=cache).command()
    for command in (alone, sharing):
        assert is_ours(" ".join(command))
    assert is_ours(ROUTER)
    assert not is_ours(f"{sys.executable} -m http.server 7610")
