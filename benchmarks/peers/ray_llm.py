"""Has what the two peers of Ray Serve LLM share: its fastest documented ingress, and its config.

From Ray's user guides "Direct streaming" and "Enable High Throughput on Ray Serve":
``RAY_SERVE_ENABLE_HA_PROXY``, ``RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING`` and
``RAY_SERVE_THROUGHPUT_OPTIMIZED``. HAProxy then passes bytes between clients and replicas, and
asks a router which replica. Its replicas listen on all interfaces: mind the firewall.

From the docstring of Ray's `ConsistentHashRouter`: a session's turns go to one replica, by the
header that ``RAY_SERVE_SESSION_ID_HEADER_KEY`` names (``x-session-id`` if it names none).
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.options import Options, engine_environment
from benchmarks.peers.plan import CONVERSATION_HEADER, Part, free_port, module

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def llm_config(options: Options, replicas: int, engine: Mapping[str, Any]) -> dict[str, Any]:
    """An `LLMConfig` as a Serve config file has it: replicas chosen by consistent hashing."""
    bundle = {"CPU": 0.5, **({"GPU": 1} if options.gpu else {})}
    workers = int(engine.get("tensor_parallel_size", 1))
    workers *= int(engine.get("pipeline_parallel_size", 1))
    return {
        "model_loading_config": {
            "model_id": options.served_model,
            "model_source": options.model_source,
        },
        "engine_kwargs": dict(engine),
        "placement_group_config": {"bundles": [bundle] * workers},
        "deployment_config": {
            "num_replicas": replicas,
            "ray_actor_options": {"num_cpus": 0},
            "request_router_config": {"request_router_class": _ROUTER},
        },
        "runtime_env": {"env_vars": engine_environment(options)},
        # LMCache's histograms and Ray's wrapper for vLLM's metrics disagree on an argument.
        "log_engine_metrics": False,
    }


def serving_part(name: str, options: Options, builder: str, arguments: Mapping[str, Any]) -> Part:
    """The process that runs an application of `ray.serve.llm`."""
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": CONVERSATION_HEADER,
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        # ConServe starts Ray with this niceness; by default Ray's engines yield to all else.
        "RAY_worker_niceness": "0",
        **engine_environment(options),
    }
    # Ray's CPUs are a book-keeping of reservations; a small machine must not refuse to start.
    cpus = max(os.cpu_count() or 1, options.engines + 4)
    return Part(name, serving_command(builder, options.port, cpus, arguments), environment)


def serving_command(
    builder: str, port: int, cpus: int, arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """The command line of `benchmarks.peers.ray_app`, which says what it takes."""
    return module("benchmarks.peers.ray_app", builder, str(port), str(cpus), json.dumps(arguments))
