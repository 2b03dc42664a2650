"""Who listens where others may reach it, and what is said of it."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conserve.settings import Settings, load
from conserve_cli.doctor.facts import Finding, ListenerFacts
from conserve_cli.doctor.observe import is_loopback, observe_listeners, owner_of, process_name
from conserve_cli.doctor.verdict import check_listeners, judge
from tests.unit.conserve_cli.doctor.sound import HEAD, NODE, SETTINGS, WORKER, bad

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
