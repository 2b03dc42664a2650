"""Ray Serve LLM's prefill-decode disaggregation, with KV through an LMCache server.

Settings: ``build_pd_openai_app`` with one prefill and N - 1 decode replicas, both with the
settings of `benchmarks.peers.ray_llm`. Ray's guide "Prefill/decode disaggregation" has LMCache
with roles ``kv_producer`` and ``kv_consumer``. It names `LMCacheConnectorV1`, which runs inside
the engine and does not support CPUs; this uses LMCache's multi-process connector, the one that
ConServe uses, through ``kv_connector_module_path``. Ray gives a connector that it does not know
its default protocol, which is the one that it has for LMCache: prefill, then decode. Every turn
is prefilled on the prefill replica.

It prefills with ``max_tokens=1`` beside whatever ``min_tokens`` a request has, which vLLM refuses;
so output lengths are forced with ``max_tokens`` and ``ignore_eos`` alone.
"""

import os
from typing import Any

from benchmarks.peers.options import Options, engine_arguments
from benchmarks.peers.plan import Part, PeerPlan, free_port, require_two
from benchmarks.peers.ray_llm import llm_config, serving_part
from conserve.settings import LMCacheSettings
from deployments.node.lmcache_server import Address, lmcache_command, lmcache_environment

NAME = "ray_pd"


def plan(options: Options) -> PeerPlan:
    """An LMCache server, one prefill replica and N - 1 decode replicas."""
    require_two(options.engines, NAME)
    address = Address("127.0.0.1", free_port(), free_port())
    shared = engine_arguments(options)
    prefill = shared | {"kv_transfer_config": _connector("kv_producer", address)}
    decode = shared | {"kv_transfer_config": _connector("kv_consumer", address)}
    arguments = {
        "prefill_config": llm_config(options, 1, prefill),
        "decode_config": llm_config(options, options.engines - 1, decode),
    }
    return PeerPlan(
        parts=(
            _server(options, address),
            serving_part(NAME, options, "build_pd_openai_app", arguments),
        ),
        engine_arguments={"prefill": prefill, "decode": decode},
        prefillers=1,
        decoders=options.engines - 1,
        min_tokens=False,
    )


def _connector(role: str, address: Address) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": address.port,
        },
    }


def _server(options: Options, address: Address) -> Part:
    environment = lmcache_environment()
    size_gb, chunk_tokens = LMCacheSettings().size_gb, 256 if options.gpu else 128
    return Part(
        "lmcache",
        tuple(lmcache_command(size_gb, chunk_tokens, address)),
        {key: value for key, value in environment.items() if os.environ.get(key) != value},
        ready_url=f"http://127.0.0.1:{address.http_port}/healthcheck",
    )
