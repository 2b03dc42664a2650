"""An engine replica: Ray Serve LLM's server around vLLM, with an HTTP server of its own.

Routers send turns straight to that server, so a token passes one process between the engine and
the client. What is not public in Ray Serve LLM or vLLM is used here and in observer.py alone:
``VLLMEngine._prepare_engine_config``, ``LLMServer.engine``, its ``build_asgi_app``,
``LLMServer._start_engine`` and its engine client.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import random
import socket
import time
from typing import Any

import aiohttp
import msgspec
import ray
import uvicorn
from ray import serve
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from autoscale.serve import DECIDED_S, WANTED_REPLICAS
from conserve.direct import Desk, Notice
from conserve.holdings import Holdings
from conserve.placement import EngineLoad
from conserve.settings import Settings
from conserve.tokenizing import TokenCache
from conserve.wire import BEAT_S, CHECK_PREFIX, PREFILL_PREFIX, SILENCE_S, Role
from deployments.engine import core
from deployments.engine.check import RequestCheck, make_checkable
from deployments.engine.core import core_loads_first
from deployments.engine.cuda_ops import require_cuda_ops
from deployments.engine.cut_calls import tell_of_cut_calls
from deployments.engine.described import describe
from deployments.engine.gpu_worker import GPU_METHOD
from deployments.engine.load import measure
from deployments.engine.messages import answer_as_anthropic
from deployments.engine.observer import TurnObserver, observe_engine, told_of_caches
from deployments.engine.refusals import explain_refusals
from deployments.engine.reporter import Reporter
from deployments.engine.response_store import ResponseKeeper
from deployments.engine.scheduler.client import SchedulerClient
from deployments.engine.scheduler.doors import require_doors
from deployments.engine.sm_slots import LEASE_METHOD, lease_of, tell_worker
from deployments.engine.sockets import unnamed_afterwards
from deployments.engine.stored import hold_until_stored
from deployments.engine.tokenizing import keep_tokens
from deployments.engine.trial import TRIED_TOKENS, try_handoff
from deployments.loopback import listen_where_ray_does
from deployments.messages import EngineInfo, EngineStarting, Heard
from deployments.model_config import values
from deployments.node.lmcache_server import REAPED_S, Address
from deployments.node.node import NodeClient
from deployments.table.table_client import TableClient, TableUnavailable
from deployments.threads import give_way_soon
from hetero.gpus import EngineUse
from hetero.host_memory import chunk_tokens, kept_tokens, page_bytes, stored_bytes
from hetero.model_shape import KvLayers, ModelUnknown, kv_of, kv_token_values
from hetero.sm_slots import SmLease
from hetero.tiers import RoleTier

logger = logging.getLogger("ray.serve")

WARM_UP_TIMEOUT_S = 300.0
# Serve gives an engine that does not scale ten seconds to end (deployments/app.py).
_LETTING_GO_S = 5.0


class Engine(VLLMEngine):  # type: ignore[misc]  # Ray ships no types for it.
    """Has the process of an engine's core compute, too, where one process on a CPU can.

    Ray Serve LLM asks vLLM for worker processes on CPUs, always. With one worker that is a process
    more, which imports vLLM for six seconds of a core at every start, takes a part in each step,
    and half a gigabyte.
    """

    def _prepare_engine_config(self, *args: Any) -> Any:
        engine_args, frontend_args, config = super()._prepare_engine_config(*args)
        parallel = config.parallel_config
        if config.device_config.device_type == "cpu" and parallel.world_size == 1:
            parallel.distributed_executor_backend = "uni"
        return engine_args, frontend_args, config


class EngineServer(LLMServer):  # type: ignore[misc]  # Ray ships no types for it.
    """A prefiller or a decoder, or both (`Settings.prefillers_host`).

    Ready means warmed up, listening and known to the conversation table.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, llm_arguments: dict[str, Any], *, role: Role, settings: Settings, tier: RoleTier
    ) -> None:
        llm_config = LLMConfig(**llm_arguments)
        context = serve.get_replica_context()
        listen_where_ray_does()
        give_way_soon()
        self._id = context.replica_id.unique_id
        self._role: Role = role
        self._settings = settings
        self._table = TableClient(context.app_name, settings)
        self._holdings = Holdings()
        self._desk = Desk(self._holdings, settings.idle_timeout_s)
        self._scheduler: SchedulerClient | None = None
        self._reporter = Reporter(self._id, self._table, self._desk, self._obey)
        self._beating: asyncio.Task[None] | None = None
        self._leaving = False
        own = settings.decoders if role == "decoder" else settings.prefillers
        self._scales = own.max_replicas is not None
        # What the table has said last.
        self._heard: Heard | None = None
        self._tokens: TokenCache | None = None
        if settings.device == "gpu":
            require_cuda_ops()
        self._node = NodeClient(context.app_name, settings)
        self._sm_slots = tier.sm_slots
        if self._sm_slots is not None:
            # Its worker leases SMs while the model loads, and they are kept for who beats.
            self._node.use = EngineUse(self._id, (), tier.cap)
        schedules = settings.schedules_conversations and settings.hosts(role)
        if schedules:
            # Before minutes of loading, and in a line of its own.
            require_doors()
        self._table.engine_starting(EngineStarting(self._id, "starting engines"))
        _use_server(llm_config, await self._node.launch())
        if self._sm_slots is not None:
            _use_slots(llm_config, self._sm_slots, self._id, self._node.actor_name)
        if os.path.isdir(llm_config.model_loading_config.model_source):  # noqa: ASYNC240
            # Nothing to download: spares a process that loads vLLM to find that out.
            llm_config.get_or_create_callback().ctx.run_init_node = False
        await self._load_engine(llm_config)
        client = self.engine._engine_client
        self._meter = measure(client)
        hold_until_stored(client)
        observe_engine(client, self._meter, schedules)
        if schedules:
            self._scheduler = SchedulerClient(client)
        gpus = await self._gpus(llm_config)
        leases = await self._leases()
        if gpus or leases:
            self._node.use = EngineUse(self._id, gpus, tier.cap, leases)
        self._server, self._serving, url = await self._listen()
        cache = client.vllm_config.cache_config
        self._info = EngineInfo(
            id=self._id,
            role=role,
            url=url,
            pid=os.getpid(),
            capacity_tokens=capacity_tokens(cache),
            max_model_len=int(client.vllm_config.model_config.max_model_len),
            max_batched_tokens=int(client.vllm_config.scheduler_config.max_num_batched_tokens),
            tier=tier.name,
            gpus=gpus,
            sm_slots=self._sm_slots or 0,
            sms=sum(lease.sms for lease in leases),
            host_tokens=self._host_tokens(client.vllm_config) if settings.parks else 0,
            also_hosts=role == "prefiller" and settings.prefillers_host,
            kind=kind_of(client.vllm_config, tier.name),
        )
        self._table.engine_starting(EngineStarting(self._id, "warming up"))
        await self._warm_up()
        await self._register()
        if self._info.hosts:
            self._reporter.start()
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    def _host_tokens(self, vllm_config: Any) -> int:
        settings = self._settings
        size_gb, chunk = settings.lmcache.size_gb, chunk_tokens(settings, settings.device == "gpu")
        page = page_bytes(size_gb, settings.nodes == "several")
        return kept_tokens(size_gb, host_token_bytes(vllm_config, chunk, page))

    async def _start_engine(self) -> None:
        """Start the engine, without the actor to which Ray Serve LLM reports its usage.

        That is a process that imports for three seconds of a core, and nobody reads it here.
        """
        await self.engine.start()

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        await self._require_engine()
        if self._serving.done():
            raise RuntimeError("the engine's HTTP server has ended")
        if self._beating is not None and self._beating.done() and not self._leaving:
            raise RuntimeError("the engine's beats to the conversation table have ended")

    async def _require_engine(self) -> None:
        await super().check_health()
        if self._observer.ending:
            raise RuntimeError("the engine's core has been told to end")

    async def _load_engine(self, config: LLMConfig) -> None:
        """Load the engine while LMCache's server comes up; the connector waits for it."""
        cache = asyncio.get_running_loop().create_task(self._node.wait_until_healthy())
        try:
            with unnamed_afterwards(), core_loads_first(core):
                await super().__init__(config, engine_cls=Engine)
        except Exception:
            # If there is no LMCache server, that is the cause, and its error says so better.
            await asyncio.wait([cache], timeout=1)
            if cache.done():
                cache.result()
            cache.cancel()
            raise
        await cache

    async def _gpus(self, config: LLMConfig) -> tuple[str, ...]:
        """UUIDs of the GPUs that the engine's workers run on; none on a CPU."""
        if not config.engine_kwargs.get("worker_extension_cls"):
            return ()
        try:
            return tuple(await self.collective_rpc(GPU_METHOD))
        except Exception as error:
            # An engine argument of the operator's own may have taken the extension's place.
            logger.warning(
                "%s %s: its GPUs are not known (%s), so their power is neither metered nor "
                "capped", self._role, self._id, error,
            )  # fmt: skip
            return ()

    async def _leases(self) -> tuple[SmLease, ...]:
        """The SMs that the engine has to itself; none unless its tier has slots."""
        if self._sm_slots is None:
            return ()
        return tuple(lease_of(said) for said in await self.collective_rpc(LEASE_METHOD))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler what the table wants; see `autoscale.serve.FollowTable`."""
        heard = self._heard
        if heard is None:
            return {}
        return {WANTED_REPLICAS: float(heard.wanted_replicas), DECIDED_S: heard.decided_s}

    async def __del__(self) -> None:
        """Serve awaits it before it ends the replica: the last turns are served first."""
        # Without a beat, it had not come to serve anything. Where the role does not scale, Serve
        # does not wait for long (deployments/app.py).
        if getattr(self, "_beating", None) is not None and self._scales:
            await self._drain()
        await self._let_go()
        await self._free_slots()
        await super().__del__()

    async def _let_go(self) -> None:
        """Have workers give back their memory, also what LMCache's server has mapped of it.

        Ray ends them without a word, and the server would keep it until it misses them.
        """
        if getattr(self, "engine", None) is None:
            return
        try:
            await asyncio.wait_for(self.collective_rpc("shutdown"), _LETTING_GO_S)
            logger.info("%s %s has let go of its KV space", self._role, self._id)
        except Exception as error:
            # It may be dead already.
            logger.warning("%s %s: its KV space is free in %g s at the latest (%s)", self._role,
                           self._id, REAPED_S, error or type(error).__name__)  # fmt: skip

    async def _free_slots(self) -> None:
        """Give back the SMs: a successor would wait for them until this engine is missed."""
        if getattr(self, "_sm_slots", None) is None:
            return
        try:
            await asyncio.wait_for(self._node.leave(self._id), _LETTING_GO_S)
        except Exception as error:
            logger.warning("%s %s: its SMs are free in %g s (%s)", self._role, self._id,
                           SILENCE_S, error or type(error).__name__)  # fmt: skip

    async def _drain(self) -> None:
        """Stay while the conversation table has anything for this engine, unless it is dead."""
        self._leaving = True
        self._desk.close()
        deadline_s = time.monotonic() + self._settings.autoscaling.drain_timeout_s
        try:
            while await self._lives():
                overdue = time.monotonic() >= deadline_s
                if not await self._table.leave(self._id, overdue):
                    break
                await asyncio.sleep(BEAT_S)
            if self._beating is not None:
                self._beating.cancel()
            await self._table.left(self._id)
        except TableUnavailable as error:
            logger.warning("%s %s leaves without a word: %s", self._role, self._id, error)

    async def _lives(self) -> bool:
        try:
            await self._require_engine()
        except Exception as error:
            logger.warning("%s %s leaves, not healthy: %s", self._role, self._id, error)
            return False
        return not self._serving.done()

    async def _listen(self) -> tuple[uvicorn.Server, asyncio.Task[None], str]:
        app = await self.engine.build_asgi_app()
        describe(app)
        state = app.state
        tell_of_cut_calls(
            state.openai_serving_chat,
            state.anthropic_serving_messages,
            state.openai_serving_responses,
        )
        explain_refusals(app)
        answer_as_anthropic(state.anthropic_serving_messages, told_of_caches)
        client = self.engine._engine_client
        settings = self._settings
        renderer = state.online_renderer
        keyed = settings.keys_file is not None
        self._tokens = keep_tokens(renderer, salted_only=keyed)
        make_checkable(client, renderer, await client.get_supported_tasks())
        keeper = ResponseKeeper(app)
        observer = self._observer = TurnObserver(
            keeper, self._holdings, self._desk, self._reporter.has_more, settings.volatile_text
        )
        host = settings.engine_host
        if host == "node":
            host = ray.util.get_node_ip_address()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
        server = uvicorn.Server(
            uvicorn.Config(
                RequestCheck(observer),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=3600,
                timeout_graceful_shutdown=5,
            )
        )
        # Signals are for the replica's own process to handle.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError(f"the engine's HTTP server did not start on {host}")
            await asyncio.sleep(0.01)
        return server, task, f"http://{host}:{listener.getsockname()[1]}"

    async def _warm_up(self) -> None:
        """Serve a few turns of its own: the first of each kind takes many times as long.

        They are a prompt of several chunks, then the same with more appended (a prefix found in
        the cache), then some at the same time.
        """
        started_s = time.monotonic()
        # A word is roughly a token. The prompt is unlike any client's, so that its KV serves nobody
        # by chance.
        words = min(600, self._info.max_model_len // 4)
        prompts = [f"{self._id} " + "warm up " * (words // 2)]
        prompts.append(prompts[0] + "again " * (words // 4))
        async with aiohttp.ClientSession(
            self._info.url, timeout=aiohttp.ClientTimeout(WARM_UP_TIMEOUT_S)
        ) as session:
            for prompt in prompts:
                await self._own_turn(session, prompt)
            self._meter.forget()
            more = (f"{prompt} {number}" for number in range(2) for prompt in prompts)
            await asyncio.gather(*(self._own_turn(session, prompt) for prompt in more))
            await self._try_lengths(session)
        logger.info("%s %s warm after %.1f s", self._role, self._id, time.monotonic() - started_s)

    async def _try_lengths(self, session: aiohttp.ClientSession) -> None:
        """Compute prompts of several lengths, here and as if they were handed over.

        By their iterations the table knows from the first turn on what work takes, and by `trial`
        what it takes beyond that to hand a prompt over.
        """
        most = self._info.max_model_len // 2
        # What neither stores nor loads has nothing to try; nor what keeps its blocks for a while.
        client = self.engine._engine_client
        hands_over = client.vllm_config.kv_transfer_config.kv_role == "kv_both"
        handoffs = []
        for tokens in sorted({min(tokens, most) for tokens in TRIED_TOKENS}):
            ask = functools.partial(self._try, session)
            compute = functools.partial(ask, "", self._own_prompt("here", tokens))
            if not hands_over:
                await compute()
                continue
            away = self._own_prompt("away", tokens)
            store = functools.partial(ask, PREFILL_PREFIX, away)
            load = functools.partial(ask, "", away)
            cost_s = await try_handoff(client, self._meter, compute, store, load, tokens)
            if cost_s is not None:
                handoffs.append((tokens, cost_s))
        self._info = dataclasses.replace(self._info, handoffs=tuple(handoffs))
        if hands_over:
            costs = ", ".join(f"{cost_s:.3f} s for {tokens} tokens" for tokens, cost_s in handoffs)
            known = costs or "nothing known"
            logger.info("%s %s: handing over costs %s", self._role, self._id, known)

    def _own_prompt(self, name: str, tokens: int) -> list[int]:
        """Token ids that are no other prompt's."""
        size = self.engine._engine_client.vllm_config.model_config.get_vocab_size()
        draw = random.Random(f"{self._id} {name} {tokens}")
        # The first and last ones of a vocabulary may be special.
        return [draw.randrange(size // 4, size // 2) for _ in range(tokens)]

    async def _try(self, session: aiohttp.ClientSession, prefix: str, prompt: list[int]) -> None:
        """Have a prompt computed, and one token more."""
        body = {"model": self._settings.model_id, "prompt": prompt, "max_tokens": 1}
        async with session.post(prefix + "/v1/completions", json=body) as response:
            await response.read()
            if response.status >= 500:
                raise RuntimeError(f"the engine failed a prompt of its own ({response.status})")

    async def _own_turn(self, session: aiohttp.ClientSession, prompt: str) -> None:
        chat = {
            "model": self._settings.model_id,
            "messages": [{"role": "user", "content": prompt}],
        }
        # A model without a chat template refuses the first two, and is warmed up by the third.
        requests = (
            (CHECK_PREFIX + "/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "max_tokens": 8, "stream": True}),
            ("/v1/completions", {"model": chat["model"], "prompt": prompt, "max_tokens": 4}),
        )
        for path, body in requests:
            async with session.post(path, json=body) as response:
                await response.read()
                if response.status >= 500:
                    raise RuntimeError(f"the engine failed its first turn ({response.status})")

    def _obey(self, notice: Notice) -> None:
        if self._scheduler is not None:
            self._scheduler.hear(notice)

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
                # A dead engine behind a living replica is as good as silent.
                await self._require_engine()
            except Exception as error:
                logger.warning("%s %s is not healthy: %s", self._role, self._id, error)
                continue
            try:
                scheduler = None if self._scheduler is None else self._scheduler.load()
                heard = await self._table.beat(self._id, self._node.energy, self._load(), scheduler)
                if heard is None or not self._reporter.is_registered:
                    await self._register()
                    continue
                self._heard = heard
                for history_id, incarnation in heard.ended:
                    self._holdings.drop(history_id, incarnation)
                if self._scheduler is not None:
                    self._scheduler.release(heard.ended, "front")
                    self._scheduler.hold(heard.holds)
            except TableUnavailable as error:
                logger.warning("%s %s: %s", self._role, self._id, error)
            except Exception:
                # Without beats the engine would be taken for lost, and stay so.
                logger.exception("%s %s: a beat failed", self._role, self._id)

    def _load(self) -> EngineLoad:
        load = self._meter.load(time.monotonic())
        if self._tokens is None:
            return load
        kept, new = self._tokens.found_tokens, self._tokens.encoded_tokens
        return msgspec.structs.replace(load, kept_text_tokens=kept, new_text_tokens=new)


def kind_of(vllm_config: Any, tier: str) -> str:
    """Return what engines have in common whose work takes the same time, by a ``VllmConfig``."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    said = (
        vllm_config.device_config.device_type,
        tier,
        model.model,
        model.quantization,
        model.dtype,
        vllm_config.cache_config.cache_dtype,
        vllm_config.parallel_config.world_size,
        scheduler.max_num_batched_tokens,
        model.enforce_eager,
    )
    return " ".join(map(str, said))


def capacity_tokens(cache_config: Any) -> int:
    """How many tokens of KV an engine holds, by its vLLM ``CacheConfig``.

    Not blocks times their size: with several kinds of layers (sliding windows, Mamba) a token takes
    a block in each kind's table, and those share one pool.
    """
    counted = cache_config.kv_cache_size_tokens
    if counted is None:
        counted = cache_config.num_gpu_blocks * cache_config.block_size
    return int(counted)


def host_token_bytes(vllm_config: Any, chunk: int, page: int) -> float:
    """Bytes that a token of an engine's KV takes in LMCache's server, by its ``VllmConfig``.

    Layers with a sliding window are counted as if they kept every token: it is less then.

    Args:
        chunk: tokens in a chunk.
        page: what the server hands out its memory in, in bytes.
    """
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    model, kept_as = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    dtype = model.dtype if kept_as == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kept_as]
    parallel = vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    # With one latent vector for all heads, all workers of a stage have the same, and one of them
    # stores it; unless there are states beside it, which differ.
    latent = model.use_mla
    each = kv_token_values(_kv(model), 1 if latent else tensor) * dtype.itemsize / stages
    writers = stages if latent and not model.is_hybrid else stages * tensor
    return stored_bytes(each, writers, chunk, page)


def _kv(model: Any) -> tuple[KvLayers, ...]:
    """Count what layers keep of each token, by vLLM's ``ModelConfig``: some may keep nothing."""
    config = values(model.hf_text_config)
    kv: tuple[KvLayers, ...] = ()
    with contextlib.suppress(ModelUnknown):
        kv = kv_of(config)
    layers = sum(one.layers for one in kv) or model.get_total_num_hidden_layers()
    if model.use_mla:
        return (KvLayers(layers, 1, model.get_head_size()),)
    if not kv or config.get("kv_lora_rank"):
        # Latent attention that is not kept as such.
        return (KvLayers(layers, model.get_total_num_kv_heads(), 2 * model.get_head_size()),)
    return kv


def _use_server(config: LLMConfig, address: Address) -> None:
    """Point the engine's connector to its own node's LMCache server."""
    transfer = config.engine_kwargs["kv_transfer_config"]
    extra = {
        **transfer["kv_connector_extra_config"],
        "lmcache.mp.host": f"tcp://{address.host}",
        "lmcache.mp.port": address.port,
    }
    config.update_engine_kwargs(kv_transfer_config={**transfer, "kv_connector_extra_config": extra})


def _use_slots(config: LLMConfig, slots: int, engine_id: str, node_actor: str) -> None:
    """Tell the engine's worker which SMs to lease, and of whom."""
    transfer = config.engine_kwargs["kv_transfer_config"]
    extra = dict(transfer["kv_connector_extra_config"])
    tell_worker(extra, slots, engine_id, node_actor)
    config.update_engine_kwargs(kv_transfer_config={**transfer, "kv_connector_extra_config": extra})
