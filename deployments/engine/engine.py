"""An engine replica: Ray Serve LLM's server around vLLM, with an HTTP server of its own."""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable
from typing import Any

import msgspec
from ray import serve
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from autoscale.serve import DECIDED_S, WANTED_REPLICAS
from conserve.direct import Desk, Notice
from conserve.holdings import Holdings
from conserve.placement import EngineLoad
from conserve.settings import Settings, SettingsError
from conserve.wire import BEAT_S, Role
from deployments.engine import core
from deployments.engine.adapters import EngineAdapters
from deployments.engine.copies import Copies
from deployments.engine.core import core_loads_first, unnamed_afterwards
from deployments.engine.engine_kernels import require_cuda_ops
from deployments.engine.gpu_worker import WorkerClient
from deployments.engine.http_server import EngineHttp
from deployments.engine.inside import inside_of
from deployments.engine.kv_layers import capacity_tokens, host_token_bytes
from deployments.engine.reporter import Reporter, measure
from deployments.engine.response_store import ResponseStore
from deployments.engine.turns import EngineTurns
from deployments.engine.vision.images import TELLS, FailedImages, NodeImages
from deployments.engine.warm_up import WarmUp
from deployments.event_loop import in_background, switch_threads_sooner
from deployments.messages import EngineInfo, EngineStarting, Heard
from deployments.node.arena import ARENA_PATH
from deployments.node.lmcache_server import REAPED_S, Address
from deployments.node.node import NodeClient
from deployments.table_client import TableClient, TableUnavailable
from deployments.tracing import tell_of_lost_collector
from deployments.upstream.outer_address import LOOPBACK
from deployments.upstream.patches import apply_patches
from deployments.upstream.seams import require_seams
from hetero.gpus import EngineUse
from hetero.host_memory import chunk_tokens, kept_tokens, page_bytes
from hetero.tiers import RoleTier
from hetero.vision_tower import ENCODERS

logger = logging.getLogger("ray.serve")

_FREEING_S = 5.0
# How often an engine that ends looks whether it has answered everything.
_LOOK_S = 0.1


class Engine(VLLMEngine):  # type: ignore[misc]  # Ray ships no types for it.
    """Has an engine's core do the work of its only worker, on a CPU.

    Ray Serve LLM always asks vLLM for worker processes there. One worker is one more process, which
    imports vLLM for six seconds of a core, takes a part in each step, and half a gigabyte.
    """

    def _prepare_engine_config(self, *args: Any) -> Any:
        engine_args, frontend_args, config = super()._prepare_engine_config(*args)
        parallel = config.parallel_config
        if config.device_config.device_type == "cpu" and parallel.world_size == 1:
            parallel.distributed_executor_backend = "uni"
        return engine_args, frontend_args, config


class EngineServer(LLMServer):  # type: ignore[misc]  # Ray ships no types for it.
    """A prefiller or a decoder, or both (`Settings.prefillers_host`), or an encoder.

    An encoder loads no language model, and has no KV and no turns: a prefill on it (see `check`)
    has the images of a prompt encoded into its node's memory.

    Serve takes it for ready when it is warmed up, listens and is known to the conversation table.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self,
        llm_arguments: dict[str, Any],
        *,
        role: Role,
        settings: Settings,
        tier: RoleTier,
        deployment: str,
        whole: Settings,
    ) -> None:
        # ``whole`` has all models: a node has one LMCache server for all of their engines.
        self._inside = inside_of(role, settings, tier)
        # Another vLLM is refused here, before minutes of loading.
        apply_patches("server")
        apply_patches("engine")
        require_seams("load", "serving")
        self._inside.require()
        llm_config = LLMConfig(**llm_arguments)
        context = serve.get_replica_context()
        apply_patches("ray")
        switch_threads_sooner()
        tell_of_lost_collector(settings)
        if settings.device == "gpu":
            require_cuda_ops()
        self._id = context.replica_id.unique_id
        self._workers = WorkerClient(self.collective_rpc)
        self._role: Role = role
        self._settings = settings
        self._tier = tier
        self._table = TableClient(context.app_name, deployment, settings)
        self._node = NodeClient(context.app_name, whole)
        self._holdings = Holdings()
        self._desk = Desk(self._holdings, settings.idle_timeout_s)
        self._reporter = Reporter(self._id, self._table, self._desk, self._obey)
        self._beating: asyncio.Task[None] | None = None
        self._leaving = False
        self._adapters: EngineAdapters | None = None
        # The table's last answer to a beat.
        self._heard: Heard | None = None

        self._table.engine_starting(EngineStarting(self._id, "starting engines"))
        server = await self._node.launch()
        await self._configure(llm_config, server)
        await self._load_engine(llm_config)
        self._info = await self._connect(llm_config, f"{LOOPBACK}:{server.http_port}")
        if role != "encoder":
            self._table.engine_starting(EngineStarting(self._id, "warming up"))
            warm_up = WarmUp(self._client, self._meter, self._info, settings.model_id)
            self._info = await warm_up.run()
        await self._register()
        if self._info.hosts:
            self._reporter.start()
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _configure(self, config: LLMConfig, server: Address) -> None:
        """Complete the engine's arguments by what its node and its model have."""
        _tell_connector(
            config, {"lmcache.mp.host": f"tcp://{server.host}", "lmcache.mp.port": server.port}
        )
        settings, encodes_only = self._settings, self._role == "encoder"
        if await asyncio.to_thread(_sees, config):
            arena = await self._node.arena() if settings.media.encoded_gb else ""
            _share_encoded(config, arena, encodes_only)
        elif encodes_only:
            raise SettingsError(f"encoders: {settings.model_id} reads text only; set encoders=0")
        inside = self._inside.configured(config.engine_kwargs, self._id, self._node)
        config.update_engine_kwargs(**inside)
        if os.path.isdir(config.model_loading_config.model_source):  # noqa: ASYNC240
            # Nothing to download. Otherwise a process loads vLLM to find that out.
            config.get_or_create_callback().ctx.run_init_node = False

    async def _connect(self, config: LLMConfig, cache_api: str) -> EngineInfo:
        """Observe the engine, which has loaded, and listen; return its description."""
        client, settings, role = self._client, self._settings, self._role
        failed = FailedImages(lambda request_ids: in_background(client.abort(request_ids)))
        self._meter = measure(client, failed.have_failed, self._node.lmcache_hangs)
        # On the event loop, nothing waits for an engine that writes.
        missing_tokens = NodeImages(client.vllm_config, waits=False).missing_tokens
        host_tokens = self._host_tokens(client.vllm_config) if settings.parks else 0
        self._copies = Copies(
            f"http://{cache_api}", client.vllm_config, host_tokens, self._chunk,
            settings.lmcache.disk.path,
        )  # fmt: skip
        gpus = await self._gpus(config)
        if gpus and settings.of_role(role).num_gpus < 1:
            await self._workers.keep_to_their_part()
        leases = await self._inside.started(client, self.collective_rpc)
        if gpus or leases:
            self._node.use = EngineUse(self._id, gpus, self._tier.cap, leases)
        app, tasks = await self.engine.build_asgi_app(), await client.get_supported_tasks()
        if client.vllm_config.lora_config is not None:
            require_seams("adapters")
            self._adapters = EngineAdapters(client, settings.model)
            app.state.openai_serving_models.lora_requests = self._adapters
        self._inside.add_routes(app)
        self._turns = EngineTurns(
            app, client, self._holdings, self._desk,
            meter=self._meter, failed=failed, missing_tokens=missing_tokens, tasks=tasks,
            stores=client.vllm_config.kv_transfer_config is not None,
            schedules=settings.schedules_conversations and settings.hosts(role),
            copies=self._copies, adapters=self._adapters, has_more=self._reporter.has_more,
            waiting_tokens=self._meter.waiting_tokens if settings.moves_turns else lambda: 0,
            responses=ResponseStore(media_bytes=settings.media.bytes),
        )  # fmt: skip
        self._http = EngineHttp(app, self._turns, settings, failed.name)
        await self._http.listen()
        cache = client.vllm_config.cache_config
        return EngineInfo(
            id=self._id, role=role, url=self._http.url, pid=os.getpid(), tier=self._tier.name,
            capacity_tokens=0 if role == "encoder" else capacity_tokens(cache),
            max_model_len=int(client.vllm_config.model_config.max_model_len),
            max_batched_tokens=int(client.vllm_config.scheduler_config.max_num_batched_tokens),
            gpus=gpus, sm_slots=self._tier.sm_slots or 0, sms=sum(lease.sms for lease in leases),
            host_tokens=host_tokens, cache_metrics=cache_api,
            also_hosts=role == "prefiller" and settings.prefillers_host,
            kind=kind_of(client.vllm_config, self._tier.name),
        )  # fmt: skip

    @property
    def _client(self) -> Any:
        """vLLM's client of the engine, once it has loaded."""
        return self.engine._engine_client

    def _host_tokens(self, vllm_config: Any) -> int:
        settings = self._settings
        # The node's models share its host memory.
        size_gb = settings.lmcache.size_gb / max(1, len(settings.models))
        page = page_bytes(size_gb, settings.nodes == "several")
        return kept_tokens(size_gb, host_token_bytes(vllm_config, self._chunk, page))

    @property
    def _chunk(self) -> int:
        return chunk_tokens(self._settings, self._settings.device == "gpu")

    async def _start_engine(self) -> None:
        """Start the engine without the actor to which Ray Serve LLM reports its usage.

        That is a process that imports for three seconds of a core, and nothing here reads it.
        """
        await self.engine.start()

    async def check_health(self) -> None:
        """Raise where Serve should replace the replica."""
        await self._require_engine()
        if self._http.has_ended:
            raise RuntimeError("the engine's HTTP server has ended")
        if self._beating is not None and self._beating.done() and not self._leaving:
            raise RuntimeError("the engine's beats to the conversation table have ended")

    async def _require_engine(self) -> None:
        await super().check_health()
        if self._turns.ending:
            raise RuntimeError("the engine's core has been told to end")

    async def _load_engine(self, config: LLMConfig) -> None:
        """Load the engine while LMCache's server starts; the connector waits for it."""
        cache = asyncio.get_running_loop().create_task(self._node.wait_until_healthy())
        try:
            with unnamed_afterwards(), core_loads_first(core):
                await super().__init__(config, engine_cls=Engine)
        except Exception:
            # Without an LMCache server that is the cause, and its error says more.
            await asyncio.wait([cache], timeout=1)
            if cache.done():
                cache.result()
            cache.cancel()
            raise
        await cache

    async def _gpus(self, config: LLMConfig) -> tuple[str, ...]:
        if not config.engine_kwargs.get("worker_extension_cls"):
            return ()
        try:
            return await self._workers.gpu_uuids()
        except Exception as error:
            # The operator may have set another worker extension.
            logger.warning(
                "%s %s: its GPUs are not known (%s), so their power is neither metered nor "
                "capped", self._role, self._id, error,
            )  # fmt: skip
            return ()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler what the table wants (`autoscale.serve.FollowTable`)."""
        heard = self._heard
        if heard is None:
            return {}
        return {WANTED_REPLICAS: float(heard.wanted_replicas), DECIDED_S: heard.decided_s}

    async def __del__(self) -> None:
        """Serve the last turns first; Serve awaits this before it ends the replica."""
        # Without a beat it never served.
        if getattr(self, "_beating", None) is not None:
            await self._drain()
        if getattr(self, "engine", None) is not None:
            # Ray ends workers at once, and LMCache's server would keep their memory mapped.
            await self._give_back("KV space", self._workers.shutdown(), REAPED_S)
        try:
            if getattr(self, "_inside", None) is not None:
                await self._inside.ended(self._give_back)
        finally:
            await super().__del__()

    async def _give_back(self, what: str, call: Awaitable[None], missed_s: float) -> None:
        """Wait for a call that frees something which else is free when the engine is missed."""
        try:
            await asyncio.wait_for(call, _FREEING_S)
            logger.info("%s %s has freed its %s", self._role, self._id, what)
        except Exception as error:
            # What is called may be dead already.
            logger.warning("%s %s: its %s will be free in %g s at the latest (%s)", self._role,
                           self._id, what, missed_s, error or type(error).__name__)  # fmt: skip

    async def _drain(self) -> None:
        """Stay while the conversation table has anything for this engine, unless it is dead."""
        self._leaving = True
        self._desk.close()
        deadline_s = time.monotonic() + self._settings.drain_timeout_s
        try:
            while await self._lives():
                overdue = time.monotonic() >= deadline_s
                if not await self._table.leave(self._id, overdue):
                    break
                await asyncio.sleep(BEAT_S)
            # The table has heard of each turn's end before the last bytes are sent.
            while self._http.is_busy and await self._lives():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            if self._beating is not None:
                self._beating.cancel()
            await self._table.left(self._id)
        except TableUnavailable as error:
            logger.warning("%s %s cannot tell the table that it leaves: %s", self._role, self._id,
                           error)  # fmt: skip

    async def _lives(self) -> bool:
        try:
            await self._require_engine()
        except Exception as error:
            logger.warning("%s %s is not healthy and ends now: %s", self._role, self._id, error)
            return False
        return not self._http.has_ended

    async def _register(self) -> None:
        registration = self._reporter.registering() if self._info.hosts else 0
        info = dataclasses.replace(
            self._info,
            registration=registration,
            holds=self._holdings.all(),
            parked=self._holdings.parked(),
            leaving=self._leaving,
            wanted_replicas=self._heard.wanted_replicas if self._heard else None,
        )
        for history_id, incarnation in await self._table.register(info):
            self._holdings.drop(history_id, incarnation)
        self._reporter.registered()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                # A dead engine behind a living replica counts as silent.
                await self._require_engine()
            except Exception as error:
                logger.warning("%s %s is not healthy: %s", self._role, self._id, error)
                continue
            try:
                load, scheduler = self._load(), self._inside.load()
                heard = await self._table.beat(self._id, self._node.energy, load, scheduler)
                if heard is None or not self._reporter.is_registered:
                    await self._register()
                    continue
                self._heard = heard
                for history_id, incarnation in heard.ended:
                    self._holdings.drop(history_id, incarnation)
                if heard.touched:
                    in_background(self._copies.touch(heard.touched))
                in_background(self._copies.forget(heard.forgotten))
                self._inside.heard(heard)
            except TableUnavailable as error:
                logger.warning("%s %s: %s", self._role, self._id, error)
            except Exception:
                # Without beats the table would count the engine as lost for good.
                logger.exception("%s %s: a beat failed", self._role, self._id)

    def _obey(self, notice: Notice) -> None:
        for history_id in notice.prefetch:
            in_background(self._prefetch(history_id))
        self._inside.hear(notice)

    async def _prefetch(self, history_id: str) -> None:
        tokens = await self._copies.load(history_id, self._http.url, self._settings.model_id)
        self._table.prefetched(history_id, tokens)

    def _load(self) -> EngineLoad:
        load = self._meter.load(time.monotonic())
        if self._adapters is not None:
            load = msgspec.structs.replace(
                load, adapters=self._adapters.ids, adapter_loads_s=self._adapters.take_loads()
            )
        if (tokens := self._http.tokens) is None:
            return load
        kept, new = tokens.found_tokens, tokens.encoded_tokens
        return msgspec.structs.replace(load, kept_text_tokens=kept, new_text_tokens=new)


def kind_of(vllm_config: Any, tier: str) -> str:
    """Return what engines have in common whose work takes equally long."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    said = (
        vllm_config.device_config.device_type, tier, model.model, model.quantization, model.dtype,
        vllm_config.cache_config.cache_dtype, vllm_config.parallel_config.world_size,
        scheduler.max_num_batched_tokens, model.enforce_eager,
    )  # fmt: skip
    return " ".join(map(str, said))


def _tell_connector(config: LLMConfig, more: dict[str, Any]) -> None:
    transfer = config.engine_kwargs.get("kv_transfer_config")
    if transfer is None:
        return
    extra = {**transfer["kv_connector_extra_config"], **more}
    config.update_engine_kwargs(kv_transfer_config={**transfer, "kv_connector_extra_config": extra})


def _sees(config: LLMConfig) -> bool:
    """Whether the model has an encoder of images, or of other media."""
    # vLLM is loaded when an engine starts, and not with this module.
    from vllm.transformers_utils.config import get_config

    own = config.engine_kwargs
    names = ("revision", "code_revision")
    try:
        read = get_config(
            own.get("hf_config_path") or config.model_loading_config.model_source,
            bool(own.get("trust_remote_code")),
            config_format=own.get("config_format", "auto"),
            **{name: own[name] for name in names if name in own},
        )
    except Exception as error:
        # Whatever vLLM makes of the model: it is served, without what its encoders would share.
        logger.warning("the model's configuration cannot be read for its encoders: %s", error)
        return False
    return any(hasattr(read, name) for name in ENCODERS)


def _share_encoded(config: LLMConfig, arena: str, encodes_only: bool) -> None:
    """Have the engine keep what it encodes in its node's arena, if any, and read from there.

    By its role vLLM knows one that only encodes, and loads no language model.
    """
    config.update_engine_kwargs(
        ec_transfer_config={
            "ec_connector": "NodeEncoderCache",
            "ec_connector_module_path": "deployments.engine.vision.connector",
            "ec_role": "ec_producer" if encodes_only else "ec_both",
            "ec_connector_extra_config": {
                ARENA_PATH: arena,
                TELLS: encodes_only or not config.engine_kwargs.get("disable_log_stats"),
            },
        }
    )
