"""Two engines on one GPU, by Ray's account: a real Ray that is told of one on a machine without.

What an engine's core asks Ray for is vLLM's own code in a process started as the core is: a child
of an actor with the replica's environment. That the cores then load is for a GPU to show.
"""

import json
import os
import subprocess
import sys

from tests.checkout import ROOT

SCRIPT = """
import json, subprocess, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from conserve.settings import load
from deployments.app import llm_arguments, placement_options

CORE = '''
import json
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
current_platform.ray_device_key = "GPU"  # There is none, so that vLLM has taken the CPU's.
print(json.dumps(RayExecutorV2._get_actor_resource_kwargs()))
'''

@ray.remote
class Replica:
    def core_asks(self):
        done = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

@ray.remote
class Worker:
    def gpus(self):
        return ray.get_gpu_ids()

settings = load({"device": "gpu", "prefillers.num_gpus": 0.35, "decoders.num_gpus": 0.65})
ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
said, workers = {}, []
for role, own in (("prefiller", settings.prefillers), ("decoder", settings.decoders)):
    options = placement_options(llm_arguments(role, settings, own, True), True)
    group = placement_group(
        options["placement_group_bundles"], strategy=options["placement_group_strategy"]
    )
    ray.get(group.ready(), timeout=60)
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    replica = Replica.options(scheduling_strategy=place, **options["ray_actor_options"]).remote()
    asked = ray.get(replica.core_asks.remote(), timeout=180)
    workers.append(Worker.options(num_cpus=0, scheduling_strategy=place, **asked).remote())
    try:
        said[role] = [asked, ray.get(workers[-1].gpus.remote(), timeout=30)]
    except ray.exceptions.GetTimeoutError:
        said[role] = [asked, "none within 30 s"]
print(json.dumps(said))
"""


def test_a_prefiller_and_a_decoder_get_their_parts_of_one_gpu(machine_alone: None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "prefiller": [{"num_gpus": 0.35}, [0]],
        "decoder": [{"num_gpus": 0.65}, [0]],
    }
