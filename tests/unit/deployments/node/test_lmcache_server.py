"""Where a node's LMCache server listens, and what it is told of others."""

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.multiprocess.config import add_mp_server_args, parse_args_to_mp_server_config

from conserve.settings import LMCacheSettings, Settings, load
from deployments.messages import NodeCache
from deployments.node import lmcache_server
from deployments.node.lmcache_server import (
    Address,
    LMCacheServer,
    choose_address,
    wait_for_server,
)
from deployments.node.node import (
    CACHE_SILENCE_S,
    NodeNames,
    NodeService,
    SeenCaches,
)
from hetero.host_memory import KEPT_SHARE
from tests.checkout import ROOT

SEPARATE = "--separate-object-groups"
GPU_THREADS = "--max-gpu-workers"
OTHER = NodeCache("b", "10.0.0.2", 7610, 41000)
LOOPBACK = Address("127.0.0.1", 7610, 7611)


def options(command: list[str]) -> dict[str, str]:
    flags = [one for one in command[command.index("server") + 1 :] if one != SEPARATE]
    return dict(zip(flags[::2], flags[1::2], strict=True))


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "alive", "nodes", "host"),
    [
        ({}, 1, "one", "127.0.0.1"),
        ({}, 2, "several", "node"),
        # A cluster that grows later.
        ({"nodes": "several"}, 1, "several", "node"),
        ({"nodes": "one"}, 3, "one", "127.0.0.1"),
    ],
)
def test_several_nodes_are_noticed(
    given: dict[str, Any], alive: int, nodes: str, host: str
) -> None:
    settings = load(given).on_nodes(alive)
    assert (settings.nodes, settings.engine_host) == (nodes, host)


# --- addresses and command lines -----------------------------------------------------------------


def test_one_node_stays_on_loopback() -> None:
    settings = Settings(nodes="one")
    address = choose_address(settings, "10.0.0.1")
    assert address == LOOPBACK
    command = options(LMCacheServer(2.0, 256, address).command())
    assert command["--host"] == command["--http-host"] == "127.0.0.1"
    assert not [flag for flag in command if "p2p" in flag or "coordinator" in flag]


def test_what_a_dead_engine_had_is_let_go_of_soon() -> None:
    """As LMCache's own parser has it, which refuses what is too soon."""
    command = LMCacheServer(2.0, 256, LOOPBACK).command()
    parser = add_mp_server_args(argparse.ArgumentParser())
    given, _ = parser.parse_known_args(command[command.index("server") + 1 :])
    config = parse_args_to_mp_server_config(given)
    assert config.worker_reap_timeout_seconds == 30
    # By its first heartbeat, too: an engine may die before that.
    assert config.worker_registration_grace_seconds == 30


def test_what_it_drops_at_a_time_leaves_what_is_said_to_be_kept() -> None:
    """The rest follows from LMCache's own watermark."""
    command = LMCacheServer(2.0, 256, LOOPBACK).command()
    given, _ = add_storage_manager_args(argparse.ArgumentParser()).parse_known_args(command)
    eviction = parse_args_to_config(given).eviction_config
    assert eviction.trigger_watermark * (1 - eviction.eviction_ratio) == pytest.approx(KEPT_SHARE)


# NIXL moves the memory that LMCache makes for it.
SHARED = {"_cache": OTHER, "directory_url": "http://127.0.0.1:5"}


@pytest.mark.parametrize(
    ("given", "apart", "copies"),
    [
        ({}, True, False),
        (SHARED, True, False),
        ({"gpu": False}, False, True),
        ({**SHARED, "gpu": False}, False, False),
    ],
)
def test_kinds_of_layers_are_stored_apart_on_gpus_and_other_engines_copy_from_its_memory(
    given: dict[str, Any], apart: bool, copies: bool
) -> None:
    command = LMCacheServer(2.0, 256, LOOPBACK, **given).command()
    assert (SEPARATE in command, "--shm-name" in command) == (apart, copies)


@pytest.mark.parametrize(("workers", "threads"), [(0, "4"), (2, "4"), (8, "8"), (16, "16")])
def test_each_worker_on_a_gpu_has_a_thread_that_copies_for_it(workers: int, threads: str) -> None:
    command = LMCacheServer(2.0, 256, LOOPBACK, gpu_workers=workers).command()
    assert options(command)[GPU_THREADS] == threads
    assert GPU_THREADS not in LMCacheServer(2.0, 256, LOOPBACK, gpu=False).command()


def test_the_admin_interface_has_no_token_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a")
    assert "RAY_AUTH_TOKEN" not in lmcache_server.lmcache_environment()


def test_several_nodes_reach_each_other_but_not_the_admin_interface() -> None:
    settings = Settings(nodes="several")
    address = choose_address(settings, "10.0.0.1")
    assert address == Address("10.0.0.1", 7610, 7611)
    command = options(LMCacheServer(4, 128, address, **SHARED).command())
    assert command["--host"] == "10.0.0.1"
    assert command["--http-host"] == "127.0.0.1"
    assert command["--instance-id"] == "b"
    assert command["--p2p-advertise-url"] == "10.0.0.2:41000"
    assert command["--coordinator-url"] == "http://127.0.0.1:5"
    assert float(command["--p2p-load-timeout"]) == 10


async def test_a_port_that_another_program_keeps_is_named_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lmcache_server, "TAKEN_TIMEOUT_S", 0.3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        address = Address("127.0.0.1", port, lmcache_server.free_port("127.0.0.1"))
        server = LMCacheServer(2.0, 128, address)
        running = asyncio.create_task(server.keep_running())
        for wait in (server.wait_until_launched, server.wait_until_healthy):
            with pytest.raises(RuntimeError, match=rf"port {port} is in use.* or to 0 for ports"):
                await asyncio.wait_for(wait(), 30)
    assert server.pid is None
    running.cancel()


def test_an_engine_waits_for_a_server_that_starts_beside_it() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        with pytest.raises(RuntimeError, match=rf"no LMCache server at {host}:{port} after 0.2 s"):
            wait_for_server(host, port, timeout_s=0.2)
        begun_s = time.monotonic()
        threading.Timer(0.5, server.listen).start()
        wait_for_server(host, port, timeout_s=30)
        assert time.monotonic() - begun_s > 0.4


async def test_a_server_that_hangs_is_killed_and_not_its_successor() -> None:
    server = LMCacheServer(2.0, 128, LOOPBACK)
    server.kill_hung(60.0)
    process = server._process = await asyncio.create_subprocess_exec("sleep", "600")
    server._started_s = time.monotonic() - 50
    # What was waited for was asked of the one before.
    server.kill_hung(60.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.5)
    # An engine tells the node's actor as it beats.
    service = NodeService(Settings(), server.address, NodeNames("app", Settings()))
    service._server = server
    await service.beat(hangs_s=40.0)
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGKILL


def test_memory_lies_on_all_sockets_in_turn() -> None:
    """By Linux's own account of a process that has asked for it, and then for memory."""
    code = (
        "from deployments.node import lmcache_server as it; print(it.interleave(it.sockets()))\n"
        "kept = bytearray(100_000_000); print(open('/proc/self/numa_maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("True") or "Seccomp:\t2" in Path("/proc/self/status").read_text()
    assert (" interleave:0" in done.stdout) == done.stdout.startswith("True")


def test_open_ports_are_neither_the_routers_nor_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_server, "_OPEN_PORTS", range(20_000, 20_100))
    monkeypatch.setattr(lmcache_server, "is_free", lambda host, port: port <= 20_002)
    settings = Settings(port=20_001, lmcache=LMCacheSettings(port=0))
    # Often enough for chance to have tried everything.
    for _ in range(30):
        address = choose_address(settings, "10.0.0.1")
        assert {address.port, address.http_port} == {20_000, 20_002}


# --- what servers are told -----------------------------------------------------------------------


def test_a_silent_node_is_forgotten_and_one_whose_server_is_down_at_once() -> None:
    seen = SeenCaches()
    seen.saw("b", OTHER, 100.0)
    assert seen.current(100.0 + CACHE_SILENCE_S) == [OTHER]
    assert seen.current(100.1 + CACHE_SILENCE_S) == []
    seen.saw("b", OTHER, 200.0)
    seen.saw("b", None, 200.1)
    assert seen.current(200.1) == []
