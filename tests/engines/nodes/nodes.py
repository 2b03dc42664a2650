"""A Ray cluster of several nodes on this machine, and the application on it."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from ray.cluster_utils import Cluster

from conserve.launch import Launch, health
from tests.engines.applications import START_S, URL
from tests.engines.metrics import metric
from tests.engines.processes import processes

# Nodes that share a machine share its ports: those of LMCache are left open. That there are
# several is for the application to notice.
_APPLICATION = """
proxy_location: Disabled
applications:
  - name: default
    import_path: conserve:app
    args:
      placement: conversation
      prefillers: {replicas: 1, num_cpus: 0.1, tier: first}
      decoders: {replicas: 2, num_cpus: 0.1, tier: second}
      lmcache: {port: 0, size_gb: 1}
      engine: {dtype: float32, num_gpu_blocks_override: 256}
"""
_ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class TwoNodes:
    """The head has the prefiller, router and table; the second node has the decoders."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "resources": {"first": 1}, "include_dashboard": False},
        )
        self.second: Any = None

    def add_second_node(self) -> None:
        """A box for the decoders, or its replacement."""
        self.second = self.cluster.add_node(num_cpus=4, resources={"second": 1})

    def lose_second_node(self) -> None:
        """Ray's processes there are killed, and with them goes everything that they started."""
        found = self._on_second()
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None
        _, left = psutil.wait_procs(found, timeout=60)
        assert not left, f"outlive their node: {left}"

    @contextlib.contextmanager
    def application(self) -> Iterator[Launch]:
        """It runs, all engines ready."""
        file = self._logs / "application.yaml"
        file.write_text(_APPLICATION)
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
        environment = {"RAY_ADDRESS": self.cluster.address}
        with Launch([], self._logs / "application.log", environment, command) as launch:
            launch.wait_until_serving(URL, 1, 2, timeout_s=START_S)
            yield launch

    def node_actor(self) -> psutil.Process:
        """The node-local actor of the second node."""
        (found,) = self._on_second("NodeService")
        return found

    def servers(self) -> dict[str, psutil.Process]:
        """Both nodes' LMCache servers, ``first`` and ``second``."""
        second = {one.pid for one in self._on_second()}
        return {
            "second" if server.pid in second else "first": server
            for server in processes(r"deployments\.node\.lmcache_main server")
        }

    def is_on_second(self, pid: int) -> bool:
        """Whether this process runs on the second node."""
        return pid in {one.pid for one in self._on_second()}

    def _on_second(self, pattern: str = "") -> list[psutil.Process]:
        if self.second is None:
            return []
        (raylet,) = self.second.all_processes["raylet"]
        return processes(pattern, below=raylet.process.pid)


@contextlib.contextmanager
def two_nodes(logs: Path) -> Iterator[TwoNodes]:
    """A cluster of two nodes; nothing of it is left behind."""
    assert not health(URL)
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    nodes = TwoNodes(logs)
    try:
        nodes.add_second_node()
        yield nodes
    finally:
        nodes.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def crossed(server: psutil.Process) -> int:
    """How many chunks an LMCache server has taken from another, by its own count."""
    (port,) = re.findall(r"--http-port (\d+)", " ".join(server.cmdline()))
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    return int(metric("lmcache_mp_l2_prefetch_load_completed_chunks_total", text))
