"""This very machine, observed."""

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conserve.settings import Settings, load
from conserve_cli.doctor import observe as observing
from conserve_cli.doctor.facts import Finding, ListenerFacts
from conserve_cli.doctor.machine import check_machine
from conserve_cli.doctor.observe import (
    is_loopback,
    observe_listeners,
    owner_of,
    process_name,
)
from conserve_cli.doctor.verdict import check_listeners, judge
from deployments.messages import NodeCache
from deployments.node.lmcache_server import Address, lmcache_command
from tests.checkout import ROOT
from tests.unit.conserve_cli.doctor.sound import HEAD, NODE, SETTINGS, WORKER, bad


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


def test_variables_of_engines_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BHLNC")
    facts = observing.observe_machine()
    assert (facts.expandable, facts.kv_layout) == (("PYTORCH_ALLOC_CONF",), "BHLNC")


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


ROUTER = ListenerFacts("router", "ray::ServeReplica:default:Router", 7, (("0.0.0.0", 8000),))
ENGINE = ListenerFacts("engine", "ray::ServeReplica:default:decoder", 8, (("192.0.2.1", 31000),))
GCS = ListenerFacts("Ray", "gcs_server", 9, (("0.0.0.0", 6379), ("::", 44217)))
LMCACHE = ListenerFacts("LMCache", "lmcache.cli.main", 10, (("192.0.2.1", 7610),))
VLLM = ListenerFacts("vLLM", "VLLM::Worker", 11, (("192.0.2.1", 40000),))


def test_each_is_named_with_what_to_do() -> None:
    findings = check_listeners([ROUTER, ENGINE, GCS, LMCACHE, VLLM], SETTINGS)
    assert bad(findings) == [
        ("warning", f"{owner}'s ports") for owner in ("router", "engine", "Ray", "LMCache", "vLLM")
    ]
    assert "gcs_server (pid 9) listens on 0.0.0.0:6379, [::]:44217" in findings[2].seen
    assert "nodes=one" in findings[3].to_do
    assert [one.level for one in check_listeners([], SETTINGS)] == ["ok"]


def test_what_the_settings_ask_for_is_not_told() -> None:
    asked = load({"host": "0.0.0.0", "unauthenticated": True})
    assert bad_of([ROUTER], asked) == []
    # Another port of the same process, and another address than the one that was asked for.
    inner = dataclasses.replace(ROUTER, addresses=(("0.0.0.0", 8000), ("::", 41000)))
    (finding,) = bad_of([inner], asked)
    assert "[::]:41000" in finding.seen
    assert ":8000" not in finding.seen
    assert len(bad_of([ROUTER], load({"host": "localhost"}))) == 1


def bad_of(seen: list[ListenerFacts], settings: Settings) -> list[Finding]:
    return [one for one in check_listeners(seen, settings) if one.level != "ok"]


def test_nodes_of_a_cluster_have_to_reach_each_other() -> None:
    node = dataclasses.replace(NODE, listeners=(GCS,))
    assert ("warning", "Ray's ports") in bad(judge(SETTINGS, [node]))
    several = [finding.subject for finding in judge(load({"nodes": "several"}), [node])]
    nodes = [dataclasses.replace(one, listeners=(GCS,)) for one in (HEAD, WORKER)]
    several += [finding.subject for finding in judge(SETTINGS, nodes)]
    assert "Ray's ports" not in several
    assert "exposure" not in several


@pytest.mark.parametrize(
    ("command", "owner", "name"),
    [
        ("ray::ServeReplica:default:Router", "router", "ray::ServeReplica:default:Router"),
        ("ray::ServeReplica:default:decoder", "engine", "ray::ServeReplica:default:decoder"),
        ("ray::ServeController.listen_for_change", "Ray", "ray::ServeController.listen_for_change"),
        ("/venv/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "Ray", "gcs_server"),
        ("/usr/bin/python3 -u /venv/ray/dashboard/dashboard.py --host=x", "Ray", "dashboard.py"),
        ("python -m ray.serve.scripts run conserve.app", "Ray", "ray.serve.scripts"),
        ("python -m lmcache.cli.main server --host x", "LMCache", "lmcache.cli.main"),
        ("VLLM::Worker", "vLLM", "VLLM::Worker"),
        ("nginx: master process", "", "nginx:"),
        ("python -m http.server", "", "http.server"),
    ],
)
def test_processes_are_known_by_their_command_lines(command: str, owner: str, name: str) -> None:
    assert owner_of(command) == owner
    assert process_name(command) == name


def test_loopback_in_all_its_spellings() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"))
    assert not any(
        is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1", "fe80::1")
    )


def test_a_process_of_rays_on_this_machine(tmp_path: Path) -> None:
    """Listening on loopback and on all addresses; only the second is told."""
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
        (seen,) = [one for one in observe_listeners() if one.pid == process.pid]
        assert seen == ListenerFacts("Ray", "agent.py", process.pid, (("0.0.0.0", port),))
        assert os.getpid() not in [one.pid for one in observe_listeners()]
    finally:
        process.kill()
        process.communicate()
