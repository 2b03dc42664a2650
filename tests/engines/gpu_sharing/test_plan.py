"""The application is built for GPUs that its cluster has, by what their node says of them.

A real Ray of three nodes, of which two have a GPU, by Ray's account and a stand-in's; at most one
of the two is the driver's own.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.nvml.standin import Machine

SCRIPT = """
import ray, torch
from ray.cluster_utils import Cluster
from conserve.settings import SettingsError, load
from deployments.app import build

torch.version.cuda = "13.0"  # This machine has PyTorch's CPU build.
cluster = Cluster(head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=2, num_gpus=1)
ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
try:
    build(load({"gpus": 1, "placement": "conversation"}))
    for arguments in ({"decoders": 3}, {"decoders": 5, "gpus": 3}):
        try:
            build(load(arguments))
        except SettingsError as error:
            print(error)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_engines_share_one_gpu_or_are_refused(machine_alone: None, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "gpus", gpus=1)
    environment = machine.environment()
    environment["PYTHONPATH"] += f":{ROOT}"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # What the log says of the first. The embedded model weighs next to nothing on 48 GiB: a quarter
    # of its KV, and half of all reserves, are the prefiller's.
    shares = dict(re.findall(r"1 x (\w+), ([\d.]+) GPU a worker", done.stderr))
    assert float(shares["prefiller"]) == pytest.approx(0.273, abs=0.001)
    assert 0.999 < sum(map(float, shares.values())) <= 1
    assert "1 prefiller x 1 + 3 decoders x 1 = 4 are asked for, and Ray has 2" in done.stdout
    assert "have engines share them (gpus=2)" in done.stdout
    # Six engines on three GPUs would have halves; there are two.
    assert "1 prefiller x 0.5 + 5 decoders x 0.5 = 3 are asked for, and Ray has 2" in done.stdout
