"""Builds the application: ``serve run conserve.app``."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import click
import ray
from ray import serve
from ray.job_config import JobConfig
from ray.serve import Application

from autoscale.capacity.served import with_profile
from autoscale.serve import serve_options
from conserve.adapters import with_adapters
from conserve.engines import engine_arguments, engine_environment, model_source
from conserve.launch import ended, hold
from conserve.settings import RoleSettings, Settings, SettingsError, load
from conserve.wire import CHUNK_TOKENS, TRANSFER_TIMEOUT_S, TURN_SILENCE_S, Role
from deployments.engine.gpu_worker import EXTENSION
from deployments.engine.inside import inside_of
from deployments.engine_arguments import require_one_split
from deployments.gpu_plans import counted, planned, planned_on_cpus, with_cpu_dtype
from deployments.joining import close_token, find_ray, keep_token
from deployments.kv_identity import FILE_TIMES, KV_SETTINGS, of_settings
from deployments.prompting import parsers_of
from deployments.router.router import Router
from deployments.start_checks import require_startable
from deployments.tier_nodes import nodes_with_gpus, wait_for_nodes
from deployments.tracing import traced_arguments, traced_environment
from deployments.upstream.outer_address import start_on_loopback
from deployments.upstream.seams import require_seams
from deployments.upstream.spinning_wait import WAITING
from hetero.cards import cards_here
from hetero.gpu_division import divided
from hetero.gpu_room import most_on_node
from hetero.host_memory import chunk_tokens
from hetero.tiers import role_tier

logger = logging.getLogger("ray.serve")

_CONNECTOR = "ResilientMPConnector"
_SETUP_HOOK = "ray.llm._internal.serve._worker_process_setup_hook"
_NO_DOMAIN = "no domain: this server takes media in data: URLs only"
_CONNECTOR_MODULE = "deployments.engine.lmcache_connector"
# A name, so that building the application does not load vLLM, which takes five seconds.
_ENGINE_SERVER = "deployments.engine.replica.EngineServer"
# Turns of one replica at a time; vLLM queues and batches them itself.
_MAX_ONGOING = 1_000_000
# Containers have less at /dev/shm by default; the least size of Ray's object store.
_SMALL_SHM_BYTES = 2**30
_LEAST_STORE_BYTES = 80 * 2**20
# How long the start waits for nodes that the cluster's autoscaler is asked for: clouds take minutes
# to bring a machine up.
_NODES_S = 600.0
# A file in the session folder of each Ray that was started here; the last few folders are kept.
_MARK = "conserve.lock"
# Time for an empty replica to end.
_LEAVING_S = 10.0


def app(arguments: dict[str, Any] | None = None) -> Application:
    """Build the application from ``serve run`` arguments, or a config file's ``args``.

    Without a cluster it starts Ray, and Serve without HTTP proxies, as the router listens itself.
    """
    alone = not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")
    try:
        settings = load(arguments)
        if alone:
            # In a cluster these files are on other nodes, where those who read them check them.
            require_startable(settings)
        if not ray.is_initialized():
            start_ray(settings)
        close_token()
        # No node joins a cluster that was just started here.
        return build(settings, 0.0 if alone else _NODES_S)
    except SettingsError as error:
        if click.get_current_context(silent=True) is None:
            raise
        # `serve run`, which would show all of the stack.
        raise _Refused(str(error)) from None


class _Refused(click.ClickException):
    """Ends the command with the status of wrong usage, and these lines."""

    exit_code = click.UsageError.exit_code

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=file is None)


def start_ray(settings: Settings) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # With Ray's default of 15, engines yield to every other process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # By default Serve's control loop and metrics run ten times a second, which is a tenth of an
    # idle application's CPU time.
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25")
    os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "1000")
    options: dict[str, Any] = {}
    if sys.flags.safe_path:
        # Ray would have its workers look for Python's modules in the working folder first.
        require_seams("working_folder")
        options["job_config"] = JobConfig(_client_job=True)
    if address := os.environ.get("RAY_ADDRESS"):
        find_ray(address)
    else:
        if settings.device != "cpu":
            settings = divided(settings, len(cards_here()), {})
        # Ray only counts reservations of CPUs; a small machine must not refuse to start.
        roles = (own for one in settings.each.values() for _, own in one.roles)
        reserved = sum(own.most_replicas * own.num_cpus for own in roles)
        options["num_cpus"] = max(os.cpu_count() or 1, int(reserved) + 2)
        options["include_dashboard"] = False
        # A Ray of its own, though one of `ray start` may run here, which RAY_ADDRESS would name.
        options["address"] = "local"
        if shutil.disk_usage("/dev/shm").total < _SMALL_SHM_BYTES:
            # Ray's store takes 30 % of the machine's memory by default. If /dev/shm is smaller, it
            # lies in files, where over 10 GB is refused. ConServe keeps nothing large in it.
            options["object_store_memory"] = _LEAST_STORE_BYTES
        if settings.nodes != "several":
            start_on_loopback()
        keep_token()
    started = ray.init(namespace="serve", log_to_driver=True, **options)
    if "address" in options:
        session = Path(started.address_info["session_dir"])
        for mark in ended(session.parent.glob(f"session_2*/{_MARK}")):
            shutil.rmtree(mark.parent, ignore_errors=True)
        # It stays open for as long as this process lives.
        hold(os.open(session / _MARK, os.O_CREAT | os.O_WRONLY, 0o600))
    serve.start(proxy_location="Disabled")


def build(settings: Settings, nodes_timeout_s: float = 0.0) -> Application:
    """Build the application for these settings on the connected cluster.

    ``nodes_timeout_s`` bounds the wait for nodes of each tier, and for GPUs. Raises `SettingsError`
    if they are missing, or the engines do not fit.
    """
    settings = settings.with_each(
        settings.for_each(lambda own: _with_parsers(with_adapters(with_profile(own))))
    )
    settings.for_each(require_one_split)
    gpu = _on_gpu(settings)
    waiting = 0
    if gpu:
        if _gpus_here():
            _require_cuda_build()
        settings = counted(settings, int(ray.cluster_resources().get("GPU", 0)))
    wait_for_nodes(settings, gpu, nodes_timeout_s)
    alive = sum(node["Alive"] for node in ray.nodes())
    # On several nodes, the model need not be on this one.
    alone = alive == 1
    settings = settings.on_nodes(alive)
    if gpu:
        nodes = nodes_with_gpus()
        settings, laid_out = planned(settings, nodes, model_is_here=alone)
        most_gpus = max((node.offer.resources.get("GPU", 0) for node in nodes), default=0)
        waiting = most_on_node(settings, most_gpus).waiting
        for line in laid_out.lines():
            logger.info("%s", line)
        for note in laid_out.notes:
            logger.warning("%s", note)
    else:
        settings = settings.with_each(
            settings.for_each(lambda own: _with_dtype(own, model_is_here=alone))
        )
        if alone:
            settings, _ = planned_on_cpus(settings)
    settings = settings.with_common(device="gpu" if gpu else "cpu")
    # Numbered by the clock: among actors of several deployments, the last one's counts.
    deployment = str(time.time_ns())
    engines = [
        _engines(role, one, settings, gpu, waiting, deployment)
        for one in settings.each.values()
        for role in _roles(one)
    ]
    options = {
        "num_replicas": settings.routers,
        "max_ongoing_requests": _MAX_ONGOING,
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + _LEAVING_S,
        **_logging(settings),
    }
    router = cast(Any, Router).options(**options)
    return router.bind(settings, deployment, *engines)


def _with_dtype(settings: Settings, model_is_here: bool) -> Settings:
    settings, dtype = with_cpu_dtype(settings, model_is_here)
    logger.info("dtype: %s", dtype)
    return settings


def _roles(settings: Settings) -> list[Role]:
    roles: list[Role] = ["decoder"]
    if settings.prefiller_replicas:
        roles.append("prefiller")
    if settings.encoders.replicas:
        roles.append("encoder")
    return roles


def _with_parsers(settings: Settings) -> Settings:
    chosen = parsers_of(settings)
    logger.info("%s", chosen.said)
    if chosen.problem is not None:
        logger.warning("%s", chosen.problem)
    return chosen.settings


def _on_gpu(settings: Settings) -> bool:
    if settings.device != "auto":
        return settings.device == "gpu"
    return bool(ray.cluster_resources().get("GPU", 0))


def _gpus_here() -> bool:
    """Return whether this node has GPUs: a head without may have another build of PyTorch."""
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and node["Resources"].get("GPU") for node in ray.nodes())


def _require_cuda_build() -> None:
    import torch

    if torch.version.cuda is None:
        raise SettingsError(
            f"device: engines should run on GPUs, but PyTorch {torch.__version__} here is a build "
            "without CUDA: run make install-gpu and use .venv-gpu; or, in a fresh environment, pip "
            "install '.[cuda]' (and leave PyTorch's CPU index out); or set device=cpu"
        )


def _engines(
    role: Role, settings: Settings, whole: Settings, gpu: bool, waiting: int, deployment: str
) -> Application:
    own = settings.of_role(role)
    config = llm_arguments(role, settings, own, gpu, waiting)
    tier = role_tier(settings, own, gpu)
    options = placement_options(config, gpu) | {
        "name": f"{role}-{settings.slug}" if settings.slug else role,
        "max_ongoing_requests": _MAX_ONGOING,
        "health_check_period_s": 2,
        "health_check_timeout_s": 60,
        # The replica ends once it has served its last turn; after this time Serve kills it.
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + _LEAVING_S,
        **_logging(settings),
    }
    if own.max_replicas is None:
        options["num_replicas"] = own.replicas
    else:
        options["autoscaling_config"] = serve_options(own.replicas, own.max_replicas)
        # It keeps its conversations for the first part of this; their last turns may be long.
        options["graceful_shutdown_timeout_s"] += TURN_SILENCE_S
    if tier.labels:
        bundles = options["placement_group_bundles"]
        options["placement_group_bundle_label_selector"] = [dict(tier.labels) for _ in bundles]
    return serve.deployment(**options)(cast(Any, _ENGINE_SERVER)).bind(
        config, role=role, settings=settings, tier=tier, deployment=deployment, whole=whole
    )


def _logging(settings: Settings) -> dict[str, Any]:
    """Return the options by which a deployment's replicas write their own logs."""
    return {"logging_config": {"encoding": "JSON"}} if settings.log.format == "json" else {}


def placement_options(config: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
    """Return where Serve places an engine's replica, and its environment.

    It equals ``LLMServer.get_deployment_options``, which would load vLLM. ``config`` is from
    `llm_arguments`.
    """
    placement = config["placement_group_config"]
    environment = {**ray.get_runtime_context().runtime_env, **config["runtime_env"]}
    if gpu:
        # Sets up the logs of vLLM's workers, which inherit it.
        environment["worker_process_setup_hook"] = _SETUP_HOOK
    actor = {**config["deployment_config"]["ray_actor_options"], "runtime_env": environment}
    return {
        "placement_group_bundles": placement["bundles"],
        "placement_group_strategy": placement["strategy"],
        "ray_actor_options": actor,
    }


def llm_arguments(
    role: Role, settings: Settings, own: RoleSettings, gpu: bool, waiting: int = 0
) -> dict[str, Any]:
    """Return the arguments of Ray Serve LLM's ``LLMConfig`` for one role's engines.

    ``waiting`` is how many processes of engines may wait for each other on a node with GPUs.
    """
    engine = engine_arguments(settings.model, gpu)
    if gpu:
        engine["worker_extension_cls"] = EXTENSION
    # Routers fetch, and engines nothing. For vLLM an empty list is no limit; this is no domain.
    engine["allowed_media_domains"] = [_NO_DOMAIN]
    own_arguments = settings.engine | own.engine
    if role == "encoder":
        # It computes no text.
        own_arguments.pop("enable_lora", None)
    else:
        engine |= traced_arguments(settings, own_arguments)
    engine |= own_arguments
    engine["enable_prefix_caching"] = True
    if role != "encoder":
        engine["kv_transfer_config"] = {
            "kv_connector": _CONNECTOR,
            "kv_connector_module_path": _CONNECTOR_MODULE,
            "kv_role": _kv_role(role, settings),
            # By default vLLM fails the request.
            "kv_load_failure_policy": "recompute",
            # Each engine adds the address of its own node's server.
            "kv_connector_extra_config": {
                "lmcache.mp.mq_timeout": TRANSFER_TIMEOUT_S,
                "lmcache.mp.heartbeat_interval": 1,
                CHUNK_TOKENS: chunk_tokens(settings, gpu),
                KV_SETTINGS: of_settings(settings, gpu),
                FILE_TIMES: settings.nodes != "several",
            },
        }
    tier = role_tier(settings, own, gpu)
    inside = inside_of(role, settings, tier)
    engine |= inside.arguments(engine, gpu)
    bundle = {"CPU": own.num_cpus, **({"GPU": own.num_gpus} if gpu else {}), **tier.resources}
    workers = int(engine.get("tensor_parallel_size", 1))
    workers *= int(engine.get("pipeline_parallel_size", 1))
    environment = engine_environment(settings.model, gpu, engine)
    if not gpu and not engine["enforce_eager"]:
        # Operators who enable compilation have a compiler.
        del environment["TORCH_COMPILE_DISABLE"]
    if not gpu and engine.get("kv_cache_memory_bytes") is not None:
        # On CPUs this variable would override the argument.
        del environment["VLLM_CPU_KVCACHE_SPACE"]
    if gpu and own.num_gpus < 1:
        # The core, the replica's child, asks Ray for this per worker; its default is a whole GPU.
        environment["VLLM_RAY_PER_WORKER_GPUS"] = str(own.num_gpus)
    return {
        "model_loading_config": {
            "model_id": settings.model_id,
            "model_source": model_source(settings.model),
        },
        "engine_kwargs": engine,
        # All on one node, with its actor and LMCache server.
        "placement_group_config": {
            "strategy": "STRICT_PACK",
            "bundles": [dict(bundle) for _ in range(workers)],
        },
        # The replica shares its first worker's reservation.
        "deployment_config": {"ray_actor_options": {"num_cpus": 0}},
        "runtime_env": {
            "env_vars": {
                **environment,
                # An allowed domain must not redirect to one that is not.
                "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
                **({WAITING: str(waiting)} if waiting else {}),
                **inside.environment(),
                **traced_environment(settings, role),
                **own.env,
            }
        },
        # The connector's histograms and Ray's wrapper for them disagree on an argument's name.
        "log_engine_metrics": False,
    }


def _kv_role(role: Role, settings: Settings) -> str:
    """Return vLLM's ``kv_role``: producers store the prompts they prefill, consumers only load.

    An engine that prefills for others, or parks, does both.
    """
    if role == "prefiller":
        return "kv_both" if settings.prefillers_host else "kv_producer"
    # Prefillers of later turns read what decoders have computed; decoders also store to park.
    stores = settings.prefills_later_turns or settings.parks
    return "kv_both" if stores else "kv_consumer"
