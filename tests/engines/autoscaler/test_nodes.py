"""Decoders come and go with the load, and nodes for them with the decoders, by Ray's autoscaler.

Ray's provider for one machine starts a node for real: a raylet, with workers and an LMCache server
of its own. `make test-autoscaler` runs this, not `make test`: it takes six minutes.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray

from conserve.launch import Launch, health
from tests.engines.applications import START_S, URL
from tests.engines.client import Agent, engines, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

# The head has a place for the prefiller; each other node has one for a decoder.
_HEAD_ID = "f" * 51 + "00000"
_PORT = 6399
# As cluster.yaml has it: a token that lies in the home from a local Ray would close this one.
_UNAUTHENTICATED = {"RAY_AUTH_MODE": "disabled"}
_HEAD = {"CPU": 2, "prefill": 1}
_CLUSTER = {
    "cluster_name": "conserve",
    "max_workers": 2,
    "idle_timeout_minutes": 0.1,
    "upscaling_speed": 1.0,
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": _HEAD, "node_config": {}, "max_workers": 0},
        "decode": {
            "resources": {"CPU": 1, "decode": 1},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        },
    },
    # `ray up` would add these.
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    "cluster_synced_files": [],
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
_APPLICATION = """
proxy_location: Disabled
applications:
  - name: default
    import_path: conserve:app
    args:
      nodes: several
      placement: conversation
      prefillers: {replicas: 1, tier: prefill}
      decoders:
        replicas: 1
        max_replicas: 2
        num_cpus: 1
        tier: decode
        engine: {num_gpu_blocks_override: 24}
      lmcache: {port: 0, size_gb: 0.5}
      engine: {dtype: float32, max_model_len: 2944}
      autoscaling: {window_s: 6}
      drain_timeout_s: 25
"""
# A decoder has room for 3,072 tokens.
FIRST = 560
# A node's actor stays for two minutes without an engine; only then is the node idle.
NODE_GOES_S = 400.0


@pytest.fixture
def address(machine_alone: None, tmp_path: Path) -> Iterator[str]:
    """Of a head with Ray's autoscaler."""
    assert not health(URL)
    address = f"{ray.util.get_node_ip_address()}:{_PORT}"
    provider = {
        "type": "fake_multinode",
        "head_node_id": _HEAD_ID,
        "gcs_address": address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({**_CLUSTER, "provider": provider}))
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--port", str(_PORT), "--include-dashboard", "false", "--autoscaling-config", str(file),
        "--num-cpus", str(_HEAD["CPU"]), "--resources", json.dumps({"prefill": 1}),
    ]  # fmt: skip
    environment = {
        **_UNAUTHENTICATED,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log = tmp_path / "head.log"
    with Launch([], log, environment, command):
        deadline_s = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline_s, f"Ray did not start: see {log}"
            time.sleep(0.2)
        yield address
    # Where `ray start` says which cluster this machine is in. Left there, the next Ray that starts
    # here by itself would look for this one.
    current = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
    if current.exists() and current.read_text().strip() == address:
        current.unlink()


def nodes(address: str) -> int:
    """How many nodes live, the head among them."""
    code = (
        f"import ray; ray.init({address!r}, log_to_driver=False);"
        "print(sum(node['Alive'] for node in ray.nodes()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    return int(found.stdout)


async def test_nodes_follow_decoders(
    address: str, client: httpx.AsyncClient, rng: random.Random, tmp_path: Path
) -> None:
    assert nodes(address) == 1
    file = tmp_path / "application.yaml"
    file.write_text(_APPLICATION)
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
    log = tmp_path / "application.log"
    with Launch([], log, {"RAY_ADDRESS": address, **_UNAUTHENTICATED}, command) as application:
        application.wait_until_serving(URL, 1, 1, timeout_s=START_S)
        assert nodes(address) == 2

        agents = [Agent(client, f"ramp-{number}") for number in range(5)]
        for agent in agents:
            await agent.say(prose(rng, FIRST), tokens=4)
        await eventually("a second decoder", lambda: len(engines("decoder")) == 2, START_S)
        assert nodes(address) == 3
        late = Agent(client, "late")
        reply = await late.say(prose(rng, FIRST), tokens=4)
        assert reply.decoder != agents[0].replies[0].decoder
        assert late.stats[0]["lmcache_tokens"] > 0
        for agent in (*agents, late):
            await client.delete(f"{URL}/v1/conversations/{agent.id}")
        await eventually("one decoder", lambda: len(engines("decoder")) == 1, 120)
        await eventually("its node is gone too", lambda: nodes(address) == 2, NODE_GOES_S)
        after = Agent(client, "after")
        await after.say(prose(rng, 100), tokens=4)
        assert metric("conserve_turns_total", outcome="failed") == 0
        assert metric("conserve_engines_lost_total") == 0
