"""The two peers of Ray Serve LLM: its fastest documented ingress, and its config.

From Ray's user guides "Direct streaming" and "Enable High Throughput on Ray Serve":
``RAY_SERVE_ENABLE_HA_PROXY``, ``RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING`` and
``RAY_SERVE_THROUGHPUT_OPTIMIZED``. HAProxy's replicas listen on all interfaces: mind the firewall.
`ConsistentHashRouter` sends a session's turns to one replica, by the header that
``RAY_SERVE_SESSION_ID_HEADER_KEY`` names (Ray's docstring).
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conserve_lab.peers.plan import (
    CONVERSATION_HEADER,
    Options,
    Part,
    PeerPlan,
    engine_arguments,
    engine_environment,
    free_port,
    module,
    require_two,
)
from deployments.node.lmcache_server import THREADS, Address, lmcache_environment
from hetero.host_memory import EVICTED_SHARE

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def ray_serve_llm(options: Options) -> PeerPlan:
    """Ray Serve LLM's own application, with session affinity: each replica does everything.

    Settings: ``build_openai_app`` with N replicas, direct streaming, and `ConsistentHashRouter` on
    the conversation's header; see `conserve_lab.peers.ray_llm` for where they are documented.
    """
    engine = engine_arguments(options)
    arguments = {"llm_configs": [_llm_config(options, options.engines, engine)]}
    return PeerPlan(
        parts=(_serving_part("ray_serve_llm", options, "build_openai_app", arguments),),
        engine_arguments={"replica": engine},
        prefillers=0,
        decoders=options.engines,
    )


def ray_pd(options: Options) -> PeerPlan:
    """Ray Serve LLM's prefill-decode disaggregation, with KV through an LMCache server.

    Settings: ``build_pd_openai_app`` with one prefill and N - 1 decode replicas, both with this
    module's settings. Ray's guide "Prefill/decode disaggregation" has LMCache
    with roles ``kv_producer`` and ``kv_consumer``. It names `LMCacheConnectorV1`, which runs inside
    the engine and does not support CPUs; this uses LMCache's multi-process connector, the one that
    ConServe uses, through ``kv_connector_module_path``. Ray gives a connector that it does not know
    its default protocol, which is the one that it has for LMCache: prefill, then decode. Every turn
    is prefilled on the prefill replica.

    It prefills with ``max_tokens=1`` beside whatever ``min_tokens`` a request has, which vLLM
    refuses; so output lengths are forced with ``max_tokens`` and ``ignore_eos`` alone.
    """
    require_two(options.engines, "ray_pd")
    address = Address("127.0.0.1", free_port(), free_port())
    shared = engine_arguments(options)
    prefill = shared | {"kv_transfer_config": connector("kv_producer", address)}
    decode = shared | {"kv_transfer_config": connector("kv_consumer", address)}
    arguments = {
        "prefill_config": _llm_config(options, 1, prefill),
        "decode_config": _llm_config(options, options.engines - 1, decode),
    }
    return PeerPlan(
        parts=(
            lmcache_server(options, address),
            _serving_part("ray_pd", options, "build_pd_openai_app", arguments),
        ),
        engine_arguments={"prefill": prefill, "decode": decode},
        prefillers=1,
        decoders=options.engines - 1,
        min_tokens=False,
    )


def _llm_config(options: Options, replicas: int, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return an `LLMConfig` as a Serve config file has it: consistent hashing chooses replicas."""
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


def _serving_part(name: str, options: Options, builder: str, arguments: Mapping[str, Any]) -> Part:
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
    given = (builder, str(options.port), str(cpus), json.dumps(arguments))
    return Part(name, module("conserve_lab.peers.ray_app", *given), environment)


def connector(role: str, address: Address) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": address.port,
        },
    }


def lmcache_server(options: Options, address: Address) -> Part:
    """Return LMCache's own server, with its defaults but for memory, chunks and threads.

    When it is full it drops a tenth, as ConServe's does, and not a fifth: it keeps more.

    ConServe's server misses a worker after 30 s without a heartbeat. LMCache's own workers send
    their first with their first request, and wait for ever for a server that has missed them.
    """
    environment = lmcache_environment()
    command = (
        *(str(Path(sys.executable).parent / "lmcache"), "server"),
        *("--host", address.host, "--port", str(address.port)),
        *("--http-host", "127.0.0.1", "--http-port", str(address.http_port)),
        # On CPUs workers copy, which the default mode has no handlers for.
        *("--supported-transfer-mode", "auto", "--eviction-policy", "LRU"),
        *("--eviction-ratio", str(EVICTED_SHARE)),
        *("--l1-size-gb", str(options.host_gib)),
        *("--chunk-size", str(256 if options.gpu else 128), "--max-workers", str(THREADS)),
    )
    return Part(
        "lmcache",
        command,
        {key: value for key, value in environment.items() if os.environ.get(key) != value},
        ready_url=f"http://127.0.0.1:{address.http_port}/healthcheck",
    )
