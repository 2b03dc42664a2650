"""The application is built for GPUs that its cluster has, by what their node says of them.

A real Ray of two nodes, of which the other one has a GPU, by Ray's account and a stand-in's.
"""

import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.nvml.standin import Machine, compile_library

SCRIPT = """
import ray, torch
from ray.cluster_utils import Cluster
from conserve.settings import SettingsError, load
from deployments.app import build

torch.version.cuda = "13.0"  # This machine has PyTorch's CPU build.
cluster = Cluster(head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False})
cluster.add_node(num_cpus=2, num_gpus=1)
ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
try:
    build(load({}))
    for arguments in ({"decoders": 3}, {"decoders": 3, "gpus": 2}):
        try:
            build(load(arguments))
        except SettingsError as error:
            print(error)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_engines_share_the_one_gpu_or_are_refused(machine_alone: None, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "gpus", gpus=1)
    environment = machine.environment(compile_library(tmp_path))
    environment |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # What the log says of the first: the embedded model on an A40 of 48 GiB.
    plan = [
        line.partition(" -- ")[2] for line in done.stderr.splitlines() if "GPU a worker" in line
    ]
    assert [line.split(", weights")[0] for line in plan] == [
        "1 x prefiller, 0.2697 GPU a worker",
        "1 x decoder, 0.7302 GPU a worker",
    ]
    assert "1 prefiller x 1 + 3 decoders x 1 = 4 are asked for, and Ray has 1" in done.stdout
    assert "have engines share them (gpus=1)" in done.stdout
    # Four engines on two GPUs would have halves; there is one.
    assert "1 prefiller x 0.5 + 3 decoders x 0.5 = 2 are asked for, and Ray has 1" in done.stdout
