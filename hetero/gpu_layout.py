"""Decides which engines share which GPUs, and how much of a GPU's memory each gets. Pure.

`with_counts` sets the number of engines and the part of a GPU that each asks Ray for. Once the
GPUs are there, `with_memory` sets what each engine does with its part.

vLLM counts all memory taken while it starts as its own, so engines that start together on a GPU
would count each other's. Engines that share a GPU therefore get ``kv_cache_memory_bytes``, which
leaves nothing to measure. Their ``gpu_memory_utilization`` is that of their part, since vLLM does
not start if less than that is free.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from conserve.engines import engine_arguments
from conserve.settings import RoleSettings, Settings, SettingsError
from conserve.wire import Role
from hetero.cards import Card
from hetero.engine_needs import (
    CONTEXT_BYTES,
    GRAPH_SETS_BYTES,
    Needs,
    gib,
    require_longest,
    role_needs,
)
from hetero.model_shape import ModelShape
from hetero.tiers import role_tier

# vLLM's default of `gpu_memory_utilization`. The rest holds CUDA contexts of other processes, such
# as LMCache's server, which has one on each GPU whose KV it copies.
UTILISATION = 0.92
# KV of a decoder relative to a prefiller's, which holds only running prompts and shared prefixes.
_HOST_WEIGHT = 3
# Ray counts GPUs in ten-thousandths.
PARTS = 10_000
# The setting with which engines neither read videos nor keep memory for them.
WITHOUT_VIDEOS = "engine.limit_mm_per_prompt.video=0"
_TOLD = "engine.kv_cache_memory_bytes"
# `Settings.gpus` of a model that has only parts of GPUs, beside other models.
SHARED = 0


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of one role, all alike; None: not known.

    ``num_gpus``, ``budget_bytes`` and ``kv_bytes`` are each worker's. Unless ``fixed``, the KV is
    an estimate of what vLLM measures at start.
    """

    role: Role
    replicas: int
    workers: int
    num_gpus: float
    budget_bytes: int | None = None
    needs: Needs | None = None
    kv_bytes: int | None = None
    fixed: bool = False
    sm_slots: int | None = None  # Tenths of a GPU's SMs; None: all of them.
    model: str = ""  # Its name and a space, of several.

    @property
    def least_kv_bytes(self) -> int:
        if self.kv_bytes is not None:
            return self.kv_bytes
        return 0 if self.needs is None else self.needs.least_kv_bytes

    @property
    def kv_tokens(self) -> int | None:
        if self.kv_bytes is None or self.needs is None:
            return None
        if self.role == "encoder":
            return 0
        return int(self.kv_bytes / self.needs.kv_token_bytes)


def with_counts(settings: Settings, gpus: int) -> Settings:
    """Return the settings with the number of engines, and the part of a GPU that each asks for.

    By default one GPU has one engine (two would hold the weights twice, and take turns), or a
    prefiller and a decoder if prefillers keep no conversations. Of several, one has a prefiller and
    each other a decoder, and encoders have GPUs of their own. With `Settings.gpus`, more engines
    than GPUs share them. Tiers and ``num_gpus`` disable this layout. Raises `SettingsError` if
    engines with several workers would share GPUs.
    """
    if laid_out_by_hand(settings):
        return settings
    cards = settings.gpus or gpus
    if not cards:
        return settings
    chosen = settings
    if cards == 1 and settings.prefillers_host and not is_given(settings, "prefillers"):
        chosen = update(chosen, "prefillers", replicas=0)
    if not is_given(settings, "decoders"):
        others = [own for name, own in chosen.roles if name != "decoders"]
        taken = sum(own.replicas * settings.workers_of(own) for own in others)
        each = settings.workers_of(settings.decoders)
        chosen = update(chosen, "decoders", replicas=max(1, (cards - taken) // each))
    engines = sum(own.most_replicas for _, own in chosen.roles)
    if sum(own.most_replicas * chosen.workers_of(own) for _, own in chosen.roles) <= cards:
        return chosen
    unsaid = not (is_given(settings, "decoders") or is_given(settings, "prefillers"))
    divided = any(chosen.workers_of(own) > 1 for _, own in chosen.roles)
    if settings.gpus is None and (divided or not (unsaid and cards == 1)):
        # They are not asked to share; `hetero.gpu_room` reports that there are too few GPUs.
        return chosen
    if divided:
        raise SettingsError(
            f"gpus: {engines} engines want GPUs of their own, since tensor_parallel_size or "
            f"pipeline_parallel_size is over 1: with {cards} GPUs, ask for fewer engines "
            "(prefillers=0 leaves decoders alone), or for one worker each"
        )
    share = floor_part(1 / math.ceil(engines / cards))
    for name, _ in chosen.roles:
        chosen = update(chosen, name, num_gpus=share)
    return chosen.model_copy(update={"gpus": cards})


def with_memory(
    settings: Settings, shape: ModelShape | None, cards: Mapping[str, Card | None]
) -> tuple[Settings, list[EnginePlan]]:
    """Return the settings with the memory that engines on one GPU are told, and the roles' plans.

    If all engines share one GPU, each gets its weights and reserve. Of the rest, a decoder gets
    three times as much as a prefiller, which holds at least the longest sequence, and an encoder
    nothing.

    Args:
        settings: from `with_counts`.
        cards: the smallest GPU that a role (``decoders``, for instance) may get.

    Raises:
        SettingsError: the engines do not fit, or the model or the GPU would have to be known.
    """
    plans = needed(settings, shape, cards)
    if settings.gpus == 1 and len(plans) > 1 and all(one.num_gpus < 1 for one in plans.values()):
        plans = _parts_of_one(settings, plans, cards["decoders"])
    for name, own in settings.roles:
        plan = plans[name] = _with_kv(name, plans[name], arguments_of(settings, own))
        if plan.num_gpus < 1:
            settings = _tell(settings, name, plan)
    return settings, [plans[name] for name, _ in settings.roles]


def needed(
    settings: Settings, shape: ModelShape | None, cards: Mapping[str, Card | None]
) -> dict[str, EnginePlan]:
    """Return the roles' engines with what they need, and no KV yet; otherwise as `with_memory`."""
    plans: dict[str, EnginePlan] = {}
    for name, own in settings.roles:
        role = cast(Role, name.removesuffix("s"))
        slots = role_tier(settings, own, gpu=True).sm_slots
        plan = EnginePlan(
            role, own.most_replicas, settings.workers_of(own), own.num_gpus, sm_slots=slots,
            model=f"{settings.model_id} " if settings.models else "",
        )  # fmt: skip
        card, arguments = cards[name], arguments_of(settings, own)
        if role != "encoder" and (told := arguments.get("kv_cache_memory_bytes")) is not None:
            plan = replace(plan, kv_bytes=int(told), fixed=True)
        if shape is not None and card is not None:
            # An encoder has no KV to which the room could go.
            keeps = None if role == "encoder" else settings.media.tower_layers
            needs = role_needs(role, shape.keeping(keeps), arguments, card)
            if "lane" in settings.mechanisms and settings.hosts(role):
                eager = slots is None or bool(arguments.get("enforce_eager"))
                beside = needs.beside_bytes + (0 if eager else GRAPH_SETS_BYTES)
                needs = replace(needs, reserve_bytes=needs.reserve_bytes + beside)
            plan = replace(plan, needs=needs)
            budget_bytes = _usable(arguments, card.memory_bytes, own.num_gpus)
            if plan.kv_bytes is not None and own.num_gpus >= 1:
                # Then vLLM does not heed `gpu_memory_utilization`; LMCache's server has a context.
                budget_bytes = card.memory_bytes - CONTEXT_BYTES
            plan = replace(plan, budget_bytes=budget_bytes)
        plans[name] = plan
    return plans


def laid_out_by_hand(settings: Settings) -> bool:
    """Return whether tiers or ``num_gpus`` say where engines go."""
    return bool(settings.tiers) or any(
        own.tier is not None or "num_gpus" in own.model_fields_set for _, own in settings.roles
    )


def arguments_of(settings: Settings, own: RoleSettings) -> dict[str, Any]:
    return engine_arguments(settings.model, gpu=True) | settings.engine | own.engine


def is_given(settings: Settings, name: str) -> bool:
    own: RoleSettings = getattr(settings, name)
    said = {"replicas", "max_replicas"} & own.model_fields_set
    return name in settings.model_fields_set and bool(said)


def update(settings: Settings, name: str, **values: Any) -> Settings:
    own: RoleSettings = getattr(settings, name)
    return settings.model_copy(update={name: own.model_copy(update=values)})


def floor_part(share: float) -> float:
    # One third is 0.3333, and three of them fit.
    return math.floor(share * PARTS + 1e-6) / PARTS


def _usable(arguments: Mapping[str, Any], card_bytes: int, num_gpus: float) -> int:
    share = float(arguments.get("gpu_memory_utilization", UTILISATION))
    return int(card_bytes * share * min(1.0, num_gpus))


def _parts_of_one(
    settings: Settings, plans: dict[str, EnginePlan], card: Card | None
) -> dict[str, EnginePlan]:
    decoder = plans["decoders"]
    prefillers = plans["prefillers"].replicas if "prefillers" in plans else 0
    encoders = plans["encoders"].replicas if "encoders" in plans else 0
    if any(one.needs is None for one in plans.values()):
        return plans
    assert card is not None
    usable = _usable(arguments_of(settings, settings.decoders), card.memory_bytes, 1.0)
    # Rounding loses at most a ten-thousandth.
    rounding = usable // PARTS + 1
    told = {name: one.kv_bytes for name, one in plans.items() if one.kv_bytes is not None}
    least = {name: told.get(name, one.needs.least_kv_bytes + rounding)
             for name, one in plans.items() if one.needs is not None}  # fmt: skip
    fixed = sum(one.replicas * one.needs.fixed_bytes for one in plans.values() if one.needs)
    pool = usable - fixed - encoders * rounding
    if pool < sum(plans[name].replicas * kept for name, kept in least.items()):
        raise SettingsError(does_not_fit(list(plans.values()), card.memory_bytes, usable))
    weight = 1 if settings.prefillers_host else _HOST_WEIGHT
    kv = pool // (prefillers + weight * decoder.replicas)
    kv = told.get("prefillers", max(kv, least.get("prefillers", 0)))
    left = (pool - prefillers * kv) // decoder.replicas
    if "decoders" in told or left < least["decoders"]:
        left = least["decoders"]
        kv = told.get("prefillers", (pool - decoder.replicas * left) // max(1, prefillers))
    parts = {}
    given = {"encoders": rounding, "prefillers": kv, "decoders": left}
    for name, plan in plans.items():
        assert plan.needs is not None
        share = floor_part((plan.needs.fixed_bytes + given[name]) / usable)
        parts[name] = replace(plan, num_gpus=share, budget_bytes=int(usable * share))
    return parts


def _with_kv(name: str, plan: EnginePlan, arguments: Mapping[str, Any]) -> EnginePlan:
    if plan.role == "encoder":
        if plan.needs and plan.budget_bytes and plan.needs.fixed_bytes > plan.budget_bytes:
            raise SettingsError(_does_not_fit_part(name, plan))
        return replace(plan, kv_bytes=0, fixed=True)
    if plan.kv_bytes is not None:
        if plan.needs is not None and not plan.needs.at_most:
            require_longest(f"{name}: {_TOLD}", plan.kv_bytes, plan.needs)
        # vLLM does not look whether there is room for what it is told.
        if (
            plan.needs
            and plan.budget_bytes
            and plan.kv_bytes + plan.needs.sure_bytes > plan.budget_bytes
        ):
            raise SettingsError(_does_not_fit_part(name, plan))
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
        # vLLM measures, and may find less taken than estimated. Weights never take less, and at
        # least half of the reserve is taken.
        exact = not (plan.needs.at_most or arguments.get("num_gpu_blocks_override"))
        least = (least if exact else 0) - (plan.needs.fixed_bytes - plan.needs.sure_bytes)
    if kv < least:
        raise SettingsError(_does_not_fit_part(name, plan))
    return replace(plan, kv_bytes=max(0, kv), fixed=shares)


def _tell(settings: Settings, name: str, plan: EnginePlan) -> Settings:
    own: RoleSettings = getattr(settings, name)
    arguments = arguments_of(settings, own)
    whole = float(arguments.get("gpu_memory_utilization", UTILISATION))
    told = own.engine | {
        "gpu_memory_utilization": max(1 / PARTS, floor_part(whole * plan.num_gpus))
    }
    if plan.role != "encoder":
        told["kv_cache_memory_bytes"] = plan.kv_bytes
    return update(settings, name, num_gpus=plan.num_gpus, engine=told)


def does_not_fit(plans: list[EnginePlan], card: int, usable: int) -> str:
    lines = [
        f"gpus: the engines do not fit on one GPU of {gib(card)} GiB, of which they may take "
        f"{gib(usable)}"
    ]
    asked = 0
    for plan in plans:
        assert plan.needs is not None
        asked += plan.replicas * (plan.needs.fixed_bytes + plan.least_kv_bytes)
        lines.append(f"{plan.replicas} x {plan.model}{plan.role}: {_sum(plan)}")
    lines.append(f"together {gib(asked)} GiB")
    lines.append(_advice(plans, usable))
    return "; ".join(lines)


def _does_not_fit_part(name: str, plan: EnginePlan) -> str:
    assert plan.needs is not None
    assert plan.budget_bytes is not None
    part = f"{plan.num_gpus:g} of a GPU" if plan.num_gpus < 1 else "a GPU"
    return (
        f"{name}: the model does not fit on {part}, of which an engine may take "
        f"{gib(plan.budget_bytes)} GiB; {_sum(plan)}; "
        + _advice([replace(plan, replicas=1)], plan.budget_bytes)
    )


def _sum(plan: EnginePlan) -> str:
    needs = plan.needs
    assert needs is not None
    cache = f" + {gib(needs.cache_bytes)} encoder cache" if needs.tower else ""
    kv = ""
    if plan.kv_bytes is not None:
        kv = f" + {gib(plan.kv_bytes)} KV by {_TOLD}"
    elif needs.kv_token_bytes:
        longest = f"the longest sequence ({needs.least_tokens:,} tokens)"
        kv = f" + {gib(needs.least_kv_bytes)} KV of {longest}"
    return (
        f"{gib(needs.weights_bytes)} weights + {gib(needs.reserve_bytes)} reserve{cache}{kv}"
        f" = {gib(needs.fixed_bytes + plan.least_kv_bytes)} GiB"
    )


def _advice(plans: list[EnginePlan], usable: int) -> str:
    fixed = sum(one.replicas * one.needs.fixed_bytes for one in plans if one.needs)
    others = sum(one.replicas * one.least_kv_bytes for one in plans if one.kv_bytes is None)
    room = usable - fixed - others
    if room > 0 and any(one.kv_bytes is not None for one in plans):
        return f"there is room for {gib(room)} GiB of KV: set less {_TOLD}, or unset it"
    videos = sum(one.replicas * one.needs.video_bytes for one in plans if one.needs)
    if videos and fixed - videos < usable:
        # Shorter sequences have smaller videos, so this is no matter of KV alone.
        return (
            f"leave videos out, which take {gib(videos)} GiB ({WITHOUT_VIDEOS}), or set a smaller "
            "engine.max_model_len"
        )
    token = sum(one.replicas * one.needs.kv_token_bytes for one in plans if one.needs)
    tokens = int(0.99 * (usable - fixed) / token) // 256 * 256 if token else 0
    if tokens >= 1024:
        return f"set engine.max_model_len={tokens}, which fits, or use more GPUs"
    return ", or ".join([*_smaller(plans, usable), "use larger GPUs"])


def _smaller(plans: list[EnginePlan], usable: int) -> list[str]:
    """Return what makes a model fit that does not, however short its sequences are."""
    if len(plans) > 1 and plans[0].model:
        return ["serve fewer models on it"]
    if len(plans) > 1:
        encodes = any(one.role == "encoder" for one in plans)
        return ["set encoders=0" if encodes else "set prefillers=0 and decoders=1"]
    needs, workers = plans[0].needs, plans[0].workers
    assert needs is not None
    if plans[0].num_gpus < 1:
        return ["ask for fewer engines, or for a larger part of a GPU for each (num_gpus)"]
    beside = needs.fixed_bytes - needs.weights_bytes
    said = []
    divided = needs.weights_bytes + needs.least_kv_bytes
    enough = next((one for one in (2, 4, 8) if divided / one + beside < usable), 0)
    if enough and workers == 1:
        said.append(f"set engine.tensor_parallel_size={enough} ({enough} GPUs an engine)")
    elif enough:
        said.append(f"give each engine {enough * workers} GPUs (a larger tensor_parallel_size)")
    most = workers * (usable - beside - needs.least_kv_bytes)
    if most > 0:
        said.append(f"use a model of at most {gib(most)} GiB of weights (a quantised one)")
    return said
