"""Measures what ConServe costs: warm turns through it, against the bare engine's own server.

The same engine settings behind vLLM's OpenAI server, behind ConServe (one prefiller, one decoder)
and behind Ray Serve LLM's usual ingress, all up at the same time and measured in turn, as
`experiments/warm.py` says. Ray Serve LLM sends several tokens at a time. With ``--beside`` there is
one more ConServe, with other settings.
"""

import json
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.peers.ray_llm import serving_command
from conserve.engines import engine_environment, model_source, server_command
from conserve.launch import Launch, LaunchError
from conserve.settings import EMBEDDED_MODEL
from experiments import warm
from experiments.agents import MODEL
from experiments.harness import Experiment

BARE, CONSERVE, RAY = "vLLM's own server", "ConServe", "Ray Serve LLM"
_BARE_PORT, _RAY_PORT, _BESIDE_PORT = 8191, 8192, 8193
_START_S = 400.0
# All systems' engines are started with these, ConServe's by its own defaults.
_ENGINE_ARGUMENTS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 16384}


def bare_engine(experiment: Experiment) -> Launch:
    source = model_source(EMBEDDED_MODEL)
    command = server_command(source, MODEL, _BARE_PORT, _ENGINE_ARGUMENTS)
    environment = engine_environment(EMBEDDED_MODEL, gpu=False)
    return Launch([], experiment.log("bare"), environment, command)


def ray_serve_llm(experiment: Experiment) -> Launch:
    """Return Ray Serve LLM with its usual ingress, which is Ray's own proxy.

    It has none of the settings for high throughput that the peer `ray_serve_llm` has.
    """
    config = {
        "model_loading_config": {
            "model_id": MODEL,
            "model_source": model_source(EMBEDDED_MODEL),
        },
        "engine_kwargs": {**_ENGINE_ARGUMENTS, "distributed_executor_backend": "mp"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
        "runtime_env": {"env_vars": engine_environment(EMBEDDED_MODEL, gpu=False)},
        "log_engine_metrics": False,
    }
    command = serving_command("build_openai_app", _RAY_PORT, 8, {"llm_configs": [config]})
    # ConServe starts Ray with this niceness; by Ray's default the engine would yield to the other
    # systems.
    environment = {"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    return Launch([], experiment.log("ray-serve-llm"), environment, command)


def _answering(launch: Launch, name: str) -> Callable[[str], None]:
    """Return a function that waits until a system lists its model."""

    def wait(url: str) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if not launch.running:
                raise LaunchError(f"{name} ended while it started; see its log")
            try:
                with urllib.request.urlopen(url + "/v1/models", timeout=15) as response:
                    found: dict[str, Any] = json.loads(response.read())
                if found["data"]:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.5)
        raise LaunchError(f"{name} was not ready after {_START_S:g} s; see its log")

    return wait


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = warm.experiment("overhead", __doc__)
    add = experiment.parser.add_argument
    add("--without-ray-serve-llm", action="store_true")
    add("--beside", metavar="NAME=VALUE", nargs="+", help="settings of one more ConServe")
    add("--client-core", type=int, help="pin this process to a core")
    options = experiment.parse(arguments)
    if options.client_core is not None:
        os.sched_setaffinity(0, {options.client_core})
    bare, peer = bare_engine(experiment), ray_serve_llm(experiment)
    systems = []
    with ExitStack() as stack:
        url = stack.enter_context(experiment.up(bare, BARE, _answering(bare, BARE), _BARE_PORT))
        systems.append(warm.System(BARE, url))
        systems.append(warm.System(CONSERVE, stack.enter_context(experiment.serving())))
        if options.beside:
            name = f"{CONSERVE}, {' '.join(options.beside)}"
            beside = experiment.serving(
                "lmcache.port=0", *options.beside, port=_BESIDE_PORT, name=name
            )
            systems.append(warm.System(name, stack.enter_context(beside)))
        if not options.without_ray_serve_llm:
            url = stack.enter_context(experiment.up(peer, RAY, _answering(peer, RAY), _RAY_PORT))
            # Behind ConServe, in the tables.
            systems.insert(2, warm.System(RAY, url))
        warm.compare(experiment, systems)


if __name__ == "__main__":
    main()
