"""vLLM's router with its program scheduling, before bare vLLM servers: each does everything.

Settings: vllm-router 0.1.17 as its guide "Program scheduling" recommends: ``global_queue``, the
programs' initial engines by consistent hashing, and ``token_capacity_per_target`` where the engine
arguments say how many blocks there are (else it goes by the number of programs). A program is told
by ``x-session-id``, which ``program_scheduling_enable_key: auto`` reads. Its cost models keep the
guide's reference coefficients: they give 0.20 s for a prompt of 2,000 tokens, for which the
embedded model takes 0.17 s on a core; for another model, calibrate them. It retries a request that
an engine refuses, as it does by default.

It has an environment of its own, since it pins what ConServe needs in other versions.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.peers.options import Options, engine_arguments, engine_environment
from benchmarks.peers.plan import Part, PeerPlan, PeerUnavailable, free_port
from conserve.engines import server_command

NAME = "vllm_router"
SESSION_HEADER = "x-session-id"
_PROGRAM = "vllm-router"
_INSTALLED = Path(__file__).resolve().parents[2] / ".clients" / _PROGRAM / "bin" / _PROGRAM
# vLLM's blocks where its arguments do not say.
_BLOCK_TOKENS = {True: 16, False: 128}


def plan(options: Options) -> PeerPlan:
    """N servers, and the router."""
    arguments = engine_arguments(options)
    environment = engine_environment(options)
    parts, urls = [], []
    for number in range(options.engines):
        port = free_port()
        urls.append(f"http://127.0.0.1:{port}")
        command = server_command(options.model_source, options.served_model, port, arguments)
        own = environment | ({"CUDA_VISIBLE_DEVICES": str(number)} if options.gpu else {})
        parts.append(Part(f"vllm-{number}", tuple(command), own, ready_url=urls[-1] + "/health"))
    router = (
        *(_router(), "--host", "127.0.0.1", "--port", str(options.port)),
        *("--worker-urls", *urls, "--policy", "consistent_hash"),
        *("--prometheus-port", str(free_port())),
        "--enable-program-scheduling",
        *("--program-scheduling-config-json", json.dumps(scheduling(options, arguments))),
    )
    return PeerPlan(
        parts=(*parts, Part(NAME, router)),
        engine_arguments={"engine": arguments},
        prefillers=0,
        decoders=options.engines,
        session_header=SESSION_HEADER,
    )


def scheduling(options: Options, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what the router is told of programs."""
    told: dict[str, Any] = {"program_scheduling_enable_key": "auto", "global_queue": True}
    blocks = arguments.get("num_gpu_blocks_override")
    if blocks is not None:
        block_tokens = arguments.get("block_size", _BLOCK_TOKENS[options.gpu])
        told["token_capacity_per_target"] = int(blocks) * int(block_tokens)
    return told


def _router() -> str:
    found = str(_INSTALLED) if _INSTALLED.exists() else shutil.which(_PROGRAM)
    if found is None:
        raise PeerUnavailable(
            f"{NAME} is not installed: run make .clients/{_PROGRAM}/.installed in a clone of "
            f"ConServe, or have {_PROGRAM} on the PATH"
        )
    return found
