"""This very machine, observed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conserve.settings import load
from conserve_cli.doctor import observe as observing
from conserve_cli.doctor.machine import check_machine
from deployments.messages import NodeCache
from deployments.node.lmcache_server import Address, lmcache_command
from tests.checkout import ROOT
from tests.unit.conserve_cli.doctor.sound import SETTINGS


def test_the_hash_is_that_of_an_engines_process() -> None:
    """Whatever the seed of this process."""
    code = "from conserve_cli.doctor.observe import observe_software as o; print(o().string_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(hashes) == 1


def test_a_port_that_this_very_process_holds() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        settings = load({"port": port, "lmcache": {"port": 0}})
        (taken,) = observing.observe_ports(settings)
        assert not taken.free
        assert not taken.ours
        assert f"pid {os.getpid()}" in taken.holder
        assert observing.observe_ports(settings, router_here=False) == []
    (free,) = observing.observe_ports(settings)
    assert free.free


def test_this_machine_as_it_is() -> None:
    seen = observing.observe_node(SETTINGS)
    assert seen.software.packages["ray"].startswith("2.60.")
    assert 0 < seen.machine.memory_available_bytes <= seen.machine.memory_total_bytes
    assert seen.machine.open_files > 0
    assert seen.machine.cpus is not None
    assert 0 < seen.machine.cpus <= (os.cpu_count() or 0)
    assert all(free > 0 for _, free in seen.machine.disk.values())


def test_an_allocators_settings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert observing.observe_machine().expandable == ("PYTORCH_ALLOC_CONF",)


def test_a_token_that_others_may_read_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    for mode, subjects in ((0o600, []), (0o640, ["token"])):
        file.touch()
        file.chmod(mode)
        seen = check_machine(observing.observe_machine(), SETTINGS, 0)
        assert [one.subject for one in seen if str(file) in one.to_do] == subjects


def test_what_a_process_may_lock_is_its_hard_limit() -> None:
    """In a process without privileges, whose soft limit is less."""
    code = (
        "import os, resource\n"
        "from conserve_cli.doctor.observe import observe_machine\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 65536))\n"
        "os.getuid() or os.setuid(65534)\n"
        "print(observe_machine().lockable_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        # Its home may be closed to others.
        env=os.environ | {"HF_HOME": "/tmp"}, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("65536", 0), done.stderr


def test_the_servers_that_nodes_start_are_known_for_ours() -> None:
    """By their command lines, whether they share KV with other nodes or not."""
    address = Address("127.0.0.1", 7610, 7611)
    alone = lmcache_command(2.0, 256, address)
    sharing = lmcache_command(
        2.0, 256, address, NodeCache("id", "10.0.0.1", 7610, 20_000), "http://127.0.0.1:1"
    )
    for command in (alone, sharing):
        assert observing.is_ours(" ".join(command))
    assert observing.is_ours("ray::ServeReplica:default:Router")
    assert not observing.is_ours(f"{sys.executable} -m http.server 7610")
