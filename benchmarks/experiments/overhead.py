"""Measures what ConServe costs: warm turns through it, against the bare engine's own server.

    python -m benchmarks.experiments.overhead [--rounds 40] [--hogs 0 2] [--beside pausing=off]

The same engine settings behind vLLM's OpenAI server, behind ConServe (one prefiller, one decoder)
and behind Ray Serve LLM's usual ingress, all up at the same time and measured in turn, as
`benchmarks.experiments.warm` says. Ray Serve LLM sends several tokens at a time. With ``--beside``
there is one more ConServe, with other settings.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import Progress

from benchmarks.experiments import warm
from benchmarks.experiments.warm import MODEL
from benchmarks.peers.ray_llm import serving_command
from conserve.console import new_console
from conserve.engines import engine_environment, model_source, server_command
from conserve.launch import Launch, LaunchError
from conserve.settings import EMBEDDED_MODEL

BARE = "vLLM's own server"
CONSERVE = "ConServe"
RAY = "Ray Serve LLM"
SYSTEMS = {
    BARE: "http://127.0.0.1:8191",
    CONSERVE: "http://127.0.0.1:8000",
    RAY: "http://127.0.0.1:8192",
}
_BESIDE_PORT = 8193
# All systems' engines are started with these, ConServe's by its own defaults.
_ENGINE_ARGUMENTS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 16384}


def _bare_engine(log: Path) -> Launch:
    source = model_source(EMBEDDED_MODEL)
    command = server_command(source, MODEL, _port(BARE), _ENGINE_ARGUMENTS)
    return Launch([], log, engine_environment(EMBEDDED_MODEL, gpu=False), command)


def _conserve_beside(settings: Sequence[str], log: Path) -> Launch:
    ports = [f"port={_BESIDE_PORT}", "lmcache.port=0"]
    return Launch(["decoders=1", *ports, *settings], log)


def _ray_serve_llm(log: Path) -> Launch:
    # This is its usual ingress, Ray's own proxy, without the settings for high throughput that the
    # peer `ray_serve_llm` has.
    command = serving_command("build_openai_app", _port(RAY), 8, {"llm_configs": [_ray_config()]})
    # ConServe starts Ray with this niceness; by Ray's default the engine would yield to the other
    # systems.
    return Launch([], log, {"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}, command)


def _ray_config() -> dict[str, Any]:
    """Ray Serve LLM's `LLMConfig` with the embedded model on one engine."""
    return {
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


def _port(system: str) -> int:
    return int(SYSTEMS[system].rsplit(":", 1)[1])


async def _until_answering(launch: Launch, url: str, name: str) -> None:
    deadline_s = time.monotonic() + 400
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            if not launch.running:
                raise LaunchError(f"{name} ended while it started; see its log")
            try:
                async with session.get(url + "/v1/models") as response:
                    if response.status == 200 and (await response.json())["data"]:
                        return
            except (aiohttp.ClientError, ValueError):
                pass
            await asyncio.sleep(0.5)
    raise LaunchError(f"{name} was not ready after 400 s; see its log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    warm.add_options(parser)
    parser.add_argument("--without-ray-serve-llm", action="store_true")
    parser.add_argument(
        "--beside", metavar="NAME=VALUE", nargs="+", help="settings of one more ConServe"
    )
    parser.add_argument("--client-core", type=int, help="pin this process to a core")
    options = parser.parse_args()
    console = new_console(least_width=130)
    if options.client_core is not None:
        os.sched_setaffinity(0, {options.client_core})
    logs = Path(tempfile.mkdtemp(prefix="conserve-overhead-"))
    systems = dict(SYSTEMS)
    if options.without_ray_serve_llm:
        del systems[RAY]
    bare = _bare_engine(logs / "bare.log")
    conserve = Launch(["decoders=1"], logs / "conserve.log")
    other = _conserve_beside(options.beside or [], logs / "beside.log")
    peer = _ray_serve_llm(logs / "ray-serve-llm.log")
    try:
        with console.status(f"starting the systems (logs: {logs})") as status:
            bare.__enter__()
            asyncio.run(_until_answering(bare, SYSTEMS[BARE], BARE))
            status.update("starting ConServe")
            conserve.__enter__()
            conserve.wait_until_serving(SYSTEMS[CONSERVE], 1, 1)
            if options.beside:
                name = f"{CONSERVE}, {' '.join(options.beside)}"
                systems[name] = f"http://127.0.0.1:{_BESIDE_PORT}"
                status.update(f"starting {name}")
                other.__enter__()
                other.wait_until_serving(systems[name], 1, 1)
            if RAY in systems:
                status.update("starting Ray Serve LLM")
                peer.__enter__()
                asyncio.run(_until_answering(peer, SYSTEMS[RAY], RAY))
        with Progress(console=console) as progress:
            results = warm.measure(
                systems,
                options.rounds,
                warm.loads(options),
                progress,
                options.seed,
                size=warm.size(options),
            )
        warm.report(results, console, BARE)
    finally:
        for launch in (peer, other, conserve, bare):
            launch.stop()
    if options.json:
        warm.write_json(options.json, options, results, BARE)


if __name__ == "__main__":
    main()
