"""vLLM's own server, bare: one engine, no router, with as many cores as all engines of others.

Settings: vLLM's defaults with the shared engine arguments (prefix caching and chunked prefill
are on). On CPUs it has the threads and the KV space of N engines. On GPUs it is one engine on
one GPU, unless the engine arguments say otherwise: ``tensor_parallel_size`` or
``data_parallel_size``. It runs by its module because ``vllm serve`` wants to be installed under
the name ``vllm``, which the CPU build is not.
"""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.options import Options, engine_arguments, engine_environment
from benchmarks.peers.plan import Part, Plan, module

NAME = "vllm"


def plan(options: Options) -> Plan:
    """One engine."""
    arguments = engine_arguments(options)
    environment = engine_environment(options)
    if not options.gpu:
        threads = str(options.engines)
        environment |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": threads}
    command = module(
        "vllm.entrypoints.openai.api_server",
        *("--model", options.model_source, "--served-model-name", options.served_model),
        *("--host", "127.0.0.1", "--port", str(options.port), "--disable-uvicorn-access-log"),
        *flags(arguments),
    )
    return Plan(
        parts=(Part(NAME, command, environment),),
        engine_arguments={"engine": arguments},
        prefillers=0,
        decoders=1,
        # With one engine there is nothing to choose.
        session_header=None,
    )


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line takes them."""
    found = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            found += [f"--{option}", text]
    return found
