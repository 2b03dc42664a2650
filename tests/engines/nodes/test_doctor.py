"""``conserve doctor`` on a Ray cluster of two nodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.nodes.nodes import two_nodes

SETTINGS = ("lmcache.port=0", "prefillers.tier=first")


def _doctor(address: str, *settings: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conserve_cli.main", "doctor", "--address", address, *settings]
    environment = {**os.environ, "COLUMNS": "400", **extra}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.usefixtures("machine_alone")
def test_every_node_is_examined_and_compared(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        sound = _doctor(nodes.cluster.address, *SETTINGS, "decoders.tier=second")
        assert sound.returncode == 0, sound.stdout + sound.stderr
        lines = sound.stdout.splitlines()
        # Each node's own findings carry its name; two nodes of one machine have one address.
        named = {line.split()[1] for line in lines if " memory: " in line}
        assert len(named) == 2
        assert all("/" in name for name in named)
        for agreed in (
            "versions: the same on every node",
            "network: every node reaches every other",
        ):
            assert f"ok      {agreed}" in lines
        (token,) = [line for line in lines if " token: " in line]
        assert token.startswith("warning token: Ray at")
        (tier,) = [line for line in lines if "decoders: second" in line]
        assert tier.startswith("ok")

        # A shell that has a token for another Ray, and uses it.
        other = _doctor(
            nodes.cluster.address, *SETTINGS, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64
        )
        assert other.returncode == 0, other.stdout + other.stderr

        sick = _doctor(nodes.cluster.address, *SETTINGS, "decoders.tier=third")
        assert sick.returncode == 1
        (wrong,) = [line for line in sick.stdout.splitlines() if line.startswith("wrong")]
        assert "decoders: no node is of third (custom resource third)" in wrong
        assert "To do: start such a node" in wrong
