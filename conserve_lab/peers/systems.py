"""Settings that each peer is started with: ConServe's placements, vLLM's server, and its router.

A peer's docstring says what it is and where its settings are documented; ``python -m
conserve_lab.peers list`` shows it.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conserve_lab.peers.plan import (
    Options,
    Part,
    PeerPlan,
    PeerUnavailable,
    engine_arguments,
    engine_environment,
    free_port,
    module,
    require_two,
    server_command,
)
from conserve_lab.peers.ray_llm import connector, lmcache_server, ray_pd, ray_serve_llm
from deployments.node.lmcache_server import Address

GPU_CHUNK_TOKENS = 2944
CPU_CHUNK_TOKENS = 512
_ROUTER = "vllm-router"
_ROUTER_INSTALLED = Path(__file__).resolve().parents[2] / ".clients" / _ROUTER / "bin" / _ROUTER
# vLLM's blocks where its arguments do not say.
_BLOCK_TOKENS = {True: 16, False: 128}


def conserve(options: Options) -> PeerPlan:
    """ConServe as in the paper: one prefiller, and decoders that keep their conversations.

    Settings: ``like=conserve_paper`` (``placement=conversation pausing=off``) with ``prefillers=1
    decoders=N-1``, as the paper has it on four GPUs (section 5.1). Everything else is what
    ``conserve serve`` starts with.
    """
    return _disaggregated("conserve", options, "like=conserve_paper")


def elastic(options: Options) -> PeerPlan:
    """ConServe that prefills wherever all conversations together wait least for it.

    Settings: ``placement=elastic`` with ``prefillers=1 decoders=N-1``, any of which may host and
    prefill. Everything else, the engines' chunk too, is what ``conserve serve`` starts with, as
    `ray_serve_llm` and `vllm` have their own defaults.
    """
    return _disaggregated("elastic", options)


def full_disaggregation(options: Options) -> PeerPlan:
    """Every turn's prefill on the prefiller: the paper's full disaggregation (section 5.1).

    Settings: ConServe's own application with ``placement=full_disaggregation prefillers=1
    decoders=N-1``: the same engines, connector and router as ``conserve``, so that the placement
    is all that differs.
    """
    return _disaggregated("full_disaggregation", options)


def per_turn(options: Options) -> PeerPlan:
    """One decision a turn, some of them wrong: AMPD, as the paper compares with it (section 5.1).

    Settings: ConServe's own application with ``placement=per_turn:R prefillers=1
    decoders=N-1``. R is 0.1 unless the options say otherwise, as in all of the paper's
    results but its figure 12. KV really moves both ways here; the paper stalls the request for as
    long instead.
    """
    placement = f"placement=per_turn:{options.wrong_decision_rate}"
    return _disaggregated("per_turn", options, placement)


def collocated(options: Options) -> PeerPlan:
    """Every engine does everything: the paper's collocated baseline (section 5.1).

    Settings: ConServe's own application with ``placement=collocated decoders=N``, pausing as
    elsewhere, and the paper's chunked prefill: ``max_num_batched_tokens`` is the largest chunk
    whose iteration takes at most five times an unloaded decode step. The paper found 2,944 tokens
    for Qwen3-0.6B on an A40, which is the default on GPUs. The default on CPUs, 512, was measured
    with the embedded model (docs/lab/peers.md). ``python -m conserve_lab.peers chunk``
    measures a chunk; give it as ``chunk_tokens``.
    """
    chunk_tokens = options.chunk_tokens or (GPU_CHUNK_TOKENS if options.gpu else CPU_CHUNK_TOKENS)
    return _application(
        "collocated",
        options,
        "placement=collocated",
        prefillers=0,
        decoders=options.engines,
        engine={"max_num_batched_tokens": chunk_tokens},
    )


def vllm(options: Options) -> PeerPlan:
    """vLLM's own server, bare: one engine, no router, with as many cores as all engines of others.

    Settings: vLLM's defaults with the shared engine arguments (prefix caching and chunked prefill
    are on). On CPUs it has the threads and the KV space of N engines. On GPUs it is one engine on
    one GPU, unless the engine arguments say otherwise: ``tensor_parallel_size`` or
    ``data_parallel_size``.
    """
    arguments = engine_arguments(options)
    environment = engine_environment(options)
    if not options.gpu:
        threads = str(options.engines)
        environment |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": threads}
    command = server_command(options.model_source, options.served_model, options.port, arguments)
    return PeerPlan(
        parts=(Part("vllm", tuple(command), environment),),
        engine_arguments={"engine": arguments},
        prefillers=0,
        decoders=1,
        # With one engine there is nothing to choose.
        session_header=None,
    )


def vllm_router(options: Options) -> PeerPlan:
    """vLLM's router with its program scheduling, before bare vLLM servers: each does everything.

    Settings: vllm-router 0.1.17 as its guide "Program scheduling" recommends: ``global_queue``, the
    programs' initial engines by consistent hashing, and ``token_capacity_per_target`` where the
    engine arguments say how many blocks there are (else it goes by the number of programs). A
    program is told by ``x-session-id``, which ``program_scheduling_enable_key: auto`` reads. Its
    cost models keep the guide's reference coefficients: they give 0.20 s for a prompt of 2,000
    tokens, for which the embedded model takes 0.17 s on a core; for another model, calibrate them.
    It retries a request that an engine refuses, as it does by default.

    It has an environment of its own, since it pins what ConServe needs in other versions.
    """
    return _routed(options, engine_arguments(options))


def vllm_lmcache(options: Options) -> PeerPlan:
    """vLLM servers that share LMCache's host memory, behind vLLM's router.

    Settings: those of `vllm_router`, and LMCache 0.5.6 in the multi-process mode that vLLM's
    examples recommend for instances that share KV: one server with LRU eviction, of a tenth at a
    time, and ``host_gib`` of memory, chunks of 256 tokens (on CPUs 128, which is a block), and
    engines with `LMCacheMPConnector` and ``kv_both``: all that is computed is stored at once, and
    found by whichever engine needs it.
    """
    return _with_lmcache(options, programs=True)


def vllm_lmcache_hash(options: Options) -> PeerPlan:
    """vLLM servers that share LMCache's host memory, behind a router that only keeps sessions.

    Settings: those of `vllm_lmcache`, without program scheduling: the router's policy is
    ``consistent_hash``, by the session's header, and no turn waits at the router.
    """
    return _with_lmcache(options, programs=False)


def _with_lmcache(options: Options, *, programs: bool) -> PeerPlan:
    address = Address("127.0.0.1", free_port(), free_port())
    arguments = engine_arguments(options) | {"kv_transfer_config": connector("kv_both", address)}
    return _routed(options, arguments, lmcache_server(options, address), programs=programs)


def _routed(
    options: Options, arguments: Mapping[str, Any], *before: Part, programs: bool = True
) -> PeerPlan:
    environment = engine_environment(options)
    parts, urls = [], []
    for number in range(options.engines):
        port = free_port()
        urls.append(f"http://127.0.0.1:{port}")
        command = server_command(options.model_source, options.served_model, port, arguments)
        own = environment | ({"CUDA_VISIBLE_DEVICES": str(number)} if options.gpu else {})
        parts.append(Part(f"vllm-{number}", tuple(command), own, ready_url=urls[-1] + "/health"))
    scheduling: dict[str, Any] = {"program_scheduling_enable_key": "auto", "global_queue": True}
    blocks = arguments.get("num_gpu_blocks_override")
    if blocks is not None:
        block_tokens = arguments.get("block_size", _BLOCK_TOKENS[options.gpu])
        scheduling["token_capacity_per_target"] = int(blocks) * int(block_tokens)
    scheduled = ("--program-scheduling-config-json", json.dumps(scheduling))
    router = (
        *(_router(), "--host", "127.0.0.1", "--port", str(options.port)),
        *("--worker-urls", *urls, "--policy", "consistent_hash"),
        *("--prometheus-port", str(free_port())),
        *(("--enable-program-scheduling", *scheduled) if programs else ()),
    )
    return PeerPlan(
        parts=(*before, *parts, Part("vllm_router", router)),
        engine_arguments={"engine": arguments},
        prefillers=0,
        decoders=options.engines,
        session_header="x-session-id",
    )


PEERS: dict[str, Callable[[Options], PeerPlan]] = {
    peer.__name__: peer
    for peer in (
        conserve,
        elastic,
        ray_serve_llm,
        ray_pd,
        vllm,
        vllm_router,
        vllm_lmcache,
        vllm_lmcache_hash,
        collocated,
        per_turn,
        full_disaggregation,
    )
}


def _disaggregated(name: str, options: Options, *settings: str) -> PeerPlan:
    require_two(options.engines, name)
    own = settings or (f"placement={name}",)
    return _application(name, options, *own, prefillers=1, decoders=options.engines - 1)


def _application(
    name: str,
    options: Options,
    *settings: str,
    prefillers: int,
    decoders: int,
    engine: Mapping[str, Any] | None = None,
) -> PeerPlan:
    own = {"enable_prompt_tokens_details": True, **(engine or {}), **options.engine}
    arguments = [
        *settings,
        f"decoders={decoders}",
        *([f"prefillers={prefillers}"] if prefillers else []),
        f"model={options.model}",
        f"device={'gpu' if options.gpu else 'cpu'}",
        f"port={options.port}",
        # Several applications on one machine each have an LMCache server, on free ports.
        "lmcache.port=0",
        f"lmcache.size_gb={options.host_gib}",
        *(f"engine.{argument}={json.dumps(value)}" for argument, value in own.items()),
    ]
    all_arguments = engine_arguments(options) | own
    roles = {"prefiller": all_arguments, "decoder": all_arguments}
    return PeerPlan(
        parts=(
            Part(
                name,
                module("ray.serve.scripts", "run", "conserve.app", *arguments),
                engine_environment(options),
            ),
        ),
        engine_arguments=roles if prefillers else {"decoder": all_arguments},
        prefillers=prefillers,
        decoders=decoders,
        releases=True,
    )


def _router() -> str:
    found = str(_ROUTER_INSTALLED) if _ROUTER_INSTALLED.exists() else shutil.which(_ROUTER)
    if found is None:
        raise PeerUnavailable(
            f"vllm_router is not installed: run make .clients/{_ROUTER}/.installed in a clone of "
            f"ConServe, or have {_ROUTER} on the PATH"
        )
    return found
