"""Which engines share which GPUs, and what of a GPU's memory each gets.

Pure: what there is comes in as numbers. Two steps, since waiting for GPUs lies between them:
`with_counts` says how many engines there are and what part of a GPU each asks Ray for,
`with_memory` what each does with its part.

vLLM takes what is free while it starts for its own, so engines that start beside each other on a
GPU would count each other's memory. Engines that share one therefore get ``kv_cache_memory_bytes``,
which leaves vLLM nothing to measure, and a ``gpu_memory_utilization`` of their part alone, since
vLLM refuses to start where less than that is free. An engine with GPUs of its own measures.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from conserve.engines import engine_arguments
from conserve.settings import RoleSettings, Settings, SettingsError
from conserve.wire import Role
from hetero.model_shape import ModelShape
from hetero.tiers import role_tier

GIB = 2**30
# vLLM's default of `gpu_memory_utilization`. What is left is for CUDA's contexts of others: that of
# LMCache's server is on every GPU whose KV it copies.
UTILISATION = 0.92
# Of each engine: CUDA's context and libraries, NCCL, workspaces of attention.
_CONTEXT_BYTES = 1 * GIB
# Captured graphs, of which there are none with `enforce_eager`.
_GRAPHS_BYTES = 1 * GIB
# The same again for each place of the border between an engine's steps and its lane, in all.
GRAPH_SETS_BYTES = 1 * GIB
# A sampler has logits, probabilities and their sorted copy, 32 bits each.
_SAMPLING_BYTES = 3 * 4
# vLLM's `max_num_seqs` for a large GPU, and for others.
_LARGE_BYTES, _LARGE_SEQS, _SEQS = 70 * GIB, 1024, 256
# KV of an engine that conversations are bound to, against that of a prefiller, which holds a prompt
# while it computes it, and the beginnings that prompts have in common.
_HOST_WEIGHT = 3
# Ray counts GPUs in ten-thousandths.
_PARTS = 10_000
# Of the estimated reserve, what vLLM is sure to find when it measures.
_SURE_RESERVE = 0.5


@dataclass(frozen=True, slots=True)
class Needs:
    """Tells what each worker of an engine takes of its GPU, and what for.

    Attributes:
        reserve_bytes: contexts, graphs, and what a step of the longest batch takes; an estimate.
        kv_token_bytes: a token's KV.
        least_tokens: the longest sequence, which vLLM wants room for.
        kv_copies: how many workers keep the same KV, of which one stores it for others.
        at_most: whether that sequence may take less than its tokens are counted for.
    """

    weights_bytes: int
    reserve_bytes: int
    kv_token_bytes: float
    least_tokens: int
    kv_copies: int = 1
    at_most: bool = False

    @property
    def fixed_bytes(self) -> int:
        """All but KV."""
        return self.weights_bytes + self.reserve_bytes

    @property
    def least_kv_bytes(self) -> int:
        """KV of the longest sequence."""
        return math.ceil(self.least_tokens * self.kv_token_bytes)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of one role, each alike.

    Attributes:
        workers: of each engine.
        num_gpus: of each worker.
        budget_bytes: what each worker may take of its GPU; None: not known.
        needs: None: not known.
        kv_bytes: each worker's; an estimate of what vLLM measures at start, unless `fixed`.
        fixed: whether it is told to the engine.
        sm_slots: tenths of a GPU's SMs that each leases; None: it runs on all.
    """

    role: Role
    replicas: int
    workers: int
    num_gpus: float
    budget_bytes: int | None = None
    needs: Needs | None = None
    kv_bytes: int | None = None
    fixed: bool = False
    sm_slots: int | None = None

    @property
    def kv_tokens(self) -> int | None:
        """Return what each engine holds."""
        if self.kv_bytes is None or self.needs is None:
            return None
        return int(self.kv_bytes / self.needs.kv_token_bytes)


def with_counts(settings: Settings, gpus: int) -> Settings:
    """These settings, with as many engines as are meant, and what part of a GPU each asks for.

    Where the settings say nothing of engines' numbers, all GPUs are used: one has a prefiller and a
    decoder; of several, one has a prefiller and each other a decoder. `Settings.gpus` has engines
    share GPUs where there are more engines. Nothing is laid out where tiers or ``num_gpus`` say
    where engines go.

    Args:
        gpus: how many the cluster has.

    Raises:
        SettingsError: engines of several workers cannot share GPUs.
    """
    if laid_out_by_hand(settings):
        return settings
    cards = settings.gpus or gpus
    if not cards:
        return settings
    chosen = settings
    if not _given(settings, "decoders"):
        taken = settings.prefiller_replicas * workers(settings, settings.prefillers)
        each = workers(settings, settings.decoders)
        chosen = _update(settings, "decoders", replicas=max(1, (cards - taken) // each))
    engines = sum(most_replicas(own) for _, own in roles(chosen))
    if sum(most_replicas(own) * workers(chosen, own) for _, own in roles(chosen)) <= cards:
        return chosen
    unsaid = not (_given(settings, "decoders") or _given(settings, "prefillers"))
    if settings.gpus is None and not (unsaid and cards == 1):
        # They are not asked to share. That there are too few, `hetero.gpu_room` says.
        return chosen
    if any(workers(chosen, own) > 1 for _, own in roles(chosen)):
        raise SettingsError(
            f"gpus: {engines} engines want GPUs of their own, since tensor_parallel_size or "
            f"pipeline_parallel_size is over 1: with {cards} GPUs, ask for fewer engines "
            "(placement=collocated has one role alone), or for one worker each"
        )
    share = _floor(1 / math.ceil(engines / cards))
    for name, _ in roles(chosen):
        chosen = _update(chosen, name, num_gpus=share)
    return chosen.model_copy(update={"gpus": cards})


def with_memory(
    settings: Settings, shape: ModelShape | None, card_bytes: Mapping[str, int | None]
) -> tuple[Settings, list[EnginePlan]]:
    """These settings, with what engines that share a GPU are told of memory; and what each gets.

    On one GPU that several engines share by `Settings.gpus`, parts are made for what each role
    does: all have their weights and reserve, and of the rest an engine that holds conversations
    gets three times as much as a prefiller, which has room for the longest sequence at least.

    Args:
        settings: as `with_counts` left them.
        shape: of the model; None: not known.
        card_bytes: memory of the smallest GPU that a role (``decoders``, ``prefillers``) may get;
            None: not known.

    Raises:
        SettingsError: the engines do not fit, with the sums; or it cannot be said without knowing
            the model and the GPU.
    """
    plans: dict[str, EnginePlan] = {}
    for name, own in roles(settings):
        role: Role = "decoder" if name == "decoders" else "prefiller"
        slots = role_tier(settings, own, gpu=True).sm_slots
        plan = EnginePlan(
            role, most_replicas(own), workers(settings, own), own.num_gpus, sm_slots=slots
        )
        card = card_bytes[name]
        if shape is not None and card is not None:
            arguments = arguments_of(settings, own)
            needed = needs(shape, arguments, card)
            if slots is not None and settings.prefill_lane and settings.hosts(role):
                graphs = 0 if arguments.get("enforce_eager") else GRAPH_SETS_BYTES
                needed = replace(needed, reserve_bytes=needed.reserve_bytes + graphs)
            plan = replace(plan, needs=needed)
            plan = replace(plan, budget_bytes=_usable(arguments, card, own.num_gpus))
        plans[name] = plan
    if settings.gpus == 1 and len(plans) > 1 and all(one.num_gpus < 1 for one in plans.values()):
        plans = _parts_of_one(settings, plans, card_bytes)
    for name, own in roles(settings):
        plan = plans[name] = _with_kv(name, plans[name], arguments_of(settings, own))
        if plan.num_gpus < 1:
            settings = _tell(settings, name, plan)
    return settings, [plans[name] for name, _ in roles(settings)]


def needs(shape: ModelShape, arguments: Mapping[str, Any], card_bytes: int) -> Needs:
    """Return what a worker takes, with these engine arguments, on a GPU of this size."""
    tensor = int(arguments.get("tensor_parallel_size", 1))
    pipeline = int(arguments.get("pipeline_parallel_size", 1))
    seqs = int(
        arguments.get("max_num_seqs") or (_LARGE_SEQS if card_bytes >= _LARGE_BYTES else _SEQS)
    )
    batched = int(arguments["max_num_batched_tokens"])
    graphs = 0 if arguments.get("enforce_eager") else _GRAPHS_BYTES
    step = batched * shape.step_width * shape.value_bytes // tensor
    sampling = seqs * shape.vocabulary * _SAMPLING_BYTES
    longest = arguments.get("max_model_len", shape.max_model_len)
    if not isinstance(longest, int) or longest < 0:
        longest = 0  # vLLM's "auto": as long as there is room for.
    kept_as = str(arguments.get("kv_cache_dtype", "auto"))
    # On each worker's host.
    offloaded = int(float(arguments.get("cpu_offload_gb") or 0) * GIB)
    return Needs(
        weights_bytes=max(0, shape.weights_bytes // (tensor * pipeline) - offloaded),
        reserve_bytes=_CONTEXT_BYTES + graphs + step + sampling,
        kv_token_bytes=shape.kv_token_bytes(tensor, kept_as) / pipeline,
        least_tokens=longest,
        kv_copies=tensor if shape.shares_kv else 1,
        at_most=shape.windowed or shape.recurrent,
    )


def require_longest(what: str, kv_bytes: int, needs: Needs) -> None:
    """Refuse a KV space that does not hold the longest sequence, as vLLM does.

    Args:
        what: it, for the message.

    Raises:
        SettingsError: it is too small; says the sums, and what would do.
    """
    if kv_bytes >= needs.least_kv_bytes:
        return
    tokens = int(kv_bytes / needs.kv_token_bytes) // 16 * 16
    raise SettingsError(
        f"{what}: {_gib(kv_bytes)} GiB hold {tokens:,} tokens, and vLLM does not start with less "
        f"than the longest sequence's {needs.least_tokens:,}, which take "
        f"{_gib(needs.least_kv_bytes)} GiB; set engine.max_model_len={tokens}, or more KV space"
    )


def roles(settings: Settings) -> list[tuple[str, RoleSettings]]:
    """The roles that have engines, by their settings' names."""
    found = [("prefillers", settings.prefillers)] if settings.prefiller_replicas else []
    return [*found, ("decoders", settings.decoders)]


def laid_out_by_hand(settings: Settings) -> bool:
    """Whether tiers or ``num_gpus`` say where engines go."""
    return bool(settings.tiers) or any(
        own.tier is not None or "num_gpus" in own.model_fields_set for _, own in roles(settings)
    )


def most_replicas(role: RoleSettings) -> int:
    """Engines of a role at most."""
    return role.max_replicas or role.replicas


def workers(settings: Settings, own: RoleSettings) -> int:
    """Workers of each engine of a role."""
    arguments = settings.engine | own.engine
    return int(arguments.get("tensor_parallel_size", 1)) * int(
        arguments.get("pipeline_parallel_size", 1)
    )


def arguments_of(settings: Settings, own: RoleSettings) -> dict[str, Any]:
    """The engine arguments of a role on GPUs, as far as memory goes."""
    return engine_arguments(settings.model, gpu=True) | settings.engine | own.engine


def _given(settings: Settings, name: str) -> bool:
    own: RoleSettings = getattr(settings, name)
    said = {"replicas", "max_replicas"} & own.model_fields_set
    return name in settings.model_fields_set and bool(said)


def _update(settings: Settings, name: str, **values: Any) -> Settings:
    own: RoleSettings = getattr(settings, name)
    return settings.model_copy(update={name: own.model_copy(update=values)})


def _floor(share: float) -> float:
    # One third is 0.3333, and three of them fit.
    return math.floor(share * _PARTS + 1e-6) / _PARTS


def _usable(arguments: Mapping[str, Any], card_bytes: int, num_gpus: float) -> int:
    """Return one engine's part of what engines may take of a GPU."""
    share = float(arguments.get("gpu_memory_utilization", UTILISATION))
    return int(card_bytes * share * min(1.0, num_gpus))


def _parts_of_one(
    settings: Settings, plans: dict[str, EnginePlan], card_bytes: Mapping[str, int | None]
) -> dict[str, EnginePlan]:
    prefiller, decoder = plans["prefillers"], plans["decoders"]
    if prefiller.needs is None or decoder.needs is None:
        return plans
    card = card_bytes["decoders"]
    assert card is not None
    usable = _usable(arguments_of(settings, settings.decoders), card, 1.0)
    # What is lost by rounding is at most a ten-thousandth.
    rounding = usable // _PARTS + 1
    least = {name: one.needs.least_kv_bytes + rounding
             for name, one in plans.items() if one.needs is not None}  # fmt: skip
    fixed = sum(one.replicas * one.needs.fixed_bytes for one in plans.values() if one.needs)
    pool = usable - fixed
    if pool < sum(plans[name].replicas * kept for name, kept in least.items()):
        raise SettingsError(_does_not_fit(list(plans.values()), card, usable))
    weight = 1 if settings.prefillers_host else _HOST_WEIGHT
    kv = pool // (prefiller.replicas + weight * decoder.replicas)
    kv = max(kv, least["prefillers"])
    left = (pool - prefiller.replicas * kv) // decoder.replicas
    if left < least["decoders"]:
        left = least["decoders"]
        kv = (pool - decoder.replicas * left) // prefiller.replicas
    parts = {}
    for name, plan, own_kv in (("prefillers", prefiller, kv), ("decoders", decoder, left)):
        assert plan.needs is not None
        share = _floor((plan.needs.fixed_bytes + own_kv) / usable)
        parts[name] = replace(plan, num_gpus=share, budget_bytes=int(usable * share))
    return parts


def _with_kv(name: str, plan: EnginePlan, arguments: Mapping[str, Any]) -> EnginePlan:
    told = arguments.get("kv_cache_memory_bytes")
    if told is not None:
        plan = replace(plan, kv_bytes=int(told), fixed=True)
        if plan.needs is not None and not plan.needs.at_most:
            require_longest(f"{name}: engine.kv_cache_memory_bytes", int(told), plan.needs)
        return plan
    if plan.needs is None or plan.budget_bytes is None:
        if plan.num_gpus < 1:
            raise SettingsError(
                f"{name}: engines that share a GPU have to be told their KV's size, and that takes "
                "the model's and the GPU's; set engine.kv_cache_memory_bytes"
            )
        return plan
    kv = plan.budget_bytes - plan.needs.fixed_bytes
    shares = plan.num_gpus < 1
    least = max(1, plan.needs.least_kv_bytes)
    if not shares:
        # It measures, and may find that less is taken than is estimated here; but not that its
        # weights take less than they are, nor that all of the reserve is free.
        exact = not (plan.needs.at_most or arguments.get("num_gpu_blocks_override"))
        least = (least if exact else 0) - int((1 - _SURE_RESERVE) * plan.needs.reserve_bytes)
    if kv < least:
        raise SettingsError(_does_not_fit_part(name, plan))
    return replace(plan, kv_bytes=max(0, kv), fixed=shares)


def _tell(settings: Settings, name: str, plan: EnginePlan) -> Settings:
    own: RoleSettings = getattr(settings, name)
    arguments = arguments_of(settings, own)
    whole = float(arguments.get("gpu_memory_utilization", UTILISATION))
    told = own.engine | {
        "kv_cache_memory_bytes": plan.kv_bytes,
        "gpu_memory_utilization": max(1 / _PARTS, _floor(whole * plan.num_gpus)),
    }
    return _update(settings, name, num_gpus=plan.num_gpus, engine=told)


def _does_not_fit(plans: list[EnginePlan], card: int, usable: int) -> str:
    lines = [
        f"gpus: the engines do not fit on one GPU of {_gib(card)} GiB, of which they may take "
        f"{_gib(usable)}"
    ]
    asked = 0
    for plan in plans:
        assert plan.needs is not None
        each = plan.needs.fixed_bytes + plan.needs.least_kv_bytes
        asked += plan.replicas * each
        lines.append(f"{plan.replicas} x {plan.role}: {_sum(plan.needs)}")
    lines.append(f"together {_gib(asked)} GiB")
    lines.append(_advice(plans, usable))
    return "\n  ".join(lines)


def _does_not_fit_part(name: str, plan: EnginePlan) -> str:
    assert plan.needs is not None
    assert plan.budget_bytes is not None
    part = f"{plan.num_gpus:g} of a GPU" if plan.num_gpus < 1 else "a GPU"
    return (
        f"{name}: the model does not fit on {part}, of which an engine may take "
        f"{_gib(plan.budget_bytes)} GiB\n  {_sum(plan.needs)}\n  "
        + _advice([replace(plan, replicas=1)], plan.budget_bytes)
    )


def _sum(needs: Needs) -> str:
    return (
        f"{_gib(needs.weights_bytes)} weights + {_gib(needs.reserve_bytes)} reserve + "
        f"{_gib(needs.least_kv_bytes)} KV of the longest sequence ({needs.least_tokens:,} tokens)"
        f" = {_gib(needs.fixed_bytes + needs.least_kv_bytes)} GiB"
    )


def _advice(plans: list[EnginePlan], usable: int) -> str:
    fixed = sum(one.replicas * one.needs.fixed_bytes for one in plans if one.needs)
    token = sum(one.replicas * one.needs.kv_token_bytes for one in plans if one.needs)
    tokens = int(0.99 * (usable - fixed) / token) // 256 * 256
    if tokens >= 1024:
        return f"set engine.max_model_len={tokens}, which fits, or use more GPUs"
    return (
        "use more or larger GPUs, a smaller or quantised model, tensor_parallel_size with GPUs of "
        "their own, or placement=collocated with decoders=1"
    )


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"
