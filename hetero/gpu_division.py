"""Divides GPUs among models: which have GPUs of their own, and which share one. Pure.

Ray places engines by ``num_gpus`` alone, and each keeps to its part of the memory, so that suffices
wherever they go. But small ones may go where a large one then has no room: two of 0.4 to the GPU
that one of 0.6 needs. So models share one GPU, in parts by their needs, or several in equal parts.
"""

import math
from collections.abc import Mapping
from itertools import count

from conserve.settings import Settings, SettingsError
from hetero.cards import Card
from hetero.gpu_layout import (
    PARTS,
    SHARED,
    does_not_fit,
    floor_part,
    is_given,
    laid_out_by_hand,
    needed,
    update,
    with_counts,
)
from hetero.model_shape import ModelShape


def divided(settings: Settings, gpus: int, weights: Mapping[str, int]) -> Settings:
    """Return the settings with all models' engines counted, each model's for its GPUs.

    A model has the GPUs that its engines ask for, or one. Each other GPU goes to the model with the
    largest weights for each that it would then have (D'Hondt's method), unless its decoders are
    given. Where there are too few, models that need one GPU each share those left. ``weights`` are
    bytes by model; where one is missing, all count as equal. Raises `SettingsError` if some model
    gets no GPU.
    """
    each = settings.each
    if len(each) == 1 or not gpus:
        return settings.with_each(settings.for_each(lambda own: with_counts(own, gpus)))
    if not all(map(weights.get, each)):
        weights = dict.fromkeys(each, 1)
    parts = settings.for_each(_least_gpus)
    unsaid = {name: own for name, own in each.items()
              if own.gpus is None and not laid_out_by_hand(own)}  # fmt: skip
    sharing = [name for name, own in unsaid.items() if parts[name] == 1
               and all(role.max_replicas is None for _, role in own.roles)]  # fmt: skip
    fixed = {name: part for name, part in parts.items() if name not in sharing}
    left = gpus - math.ceil(sum(fixed.values()) - 1 / PARTS)
    if left < min(1, len(sharing)):
        asked = [f"{part:g} for {name}" for name, part in fixed.items()]
        asked += [f"1 for {' and '.join(sharing)}"] if sharing else []
        raise SettingsError(
            f"gpus: {' + '.join(asked)} = {gpus - left + min(1, len(sharing))} are asked for, and "
            f"Ray has {gpus}; ask for fewer engines (prefillers=0 decoders=1 is the least), or "
            "leave gpus out: then models of one engine share a GPU"
        )
    groups: list[list[str]] = [[] for _ in range(left)]
    for name in sorted(sharing, key=lambda name: -weights[name]):
        min(groups, key=lambda one: sum(weights[other] for other in one)).append(name)
    rest = left - len(sharing)
    steps = {name: own.workers_of(own.decoders) for name, own in unsaid.items()
             if not is_given(own, "decoders")}  # fmt: skip
    while fitting := [name for name, step in steps.items() if step <= rest]:
        most = max(fitting, key=lambda name: weights[name] / (parts[name] + steps[name]))
        parts[most] += steps[most]
        rest -= steps[most]
    chosen = settings.for_each(lambda own: with_counts(own, int(parts[own.model_id])))
    crowds = [[chosen[name] for name in group] for group in groups if len(group) > 1]
    crowded = [sum(role.replicas for own in one for _, role in own.roles) for one in crowds]
    for own in (own for crowd in crowds for own in crowd):
        for role, _ in own.roles:
            equal = floor_part(1 / max(crowded))
            chosen[own.model_id] = _with_part(chosen[own.model_id], role, equal)
    return settings.with_each(chosen)


def _least_gpus(settings: Settings) -> float:
    """Return the GPUs with which a model has the engines that it asks for, or one."""
    if laid_out_by_hand(settings):
        return _asked(settings)
    return next(gpus for gpus in count(1) if _asked(with_counts(settings, gpus)) <= gpus)


def _asked(settings: Settings) -> float:
    roles = [own for _, own in settings.roles]
    return sum(own.replicas * settings.workers_of(own) * own.num_gpus for own in roles)


def _with_part(settings: Settings, name: str, part: float) -> Settings:
    return update(settings, name, num_gpus=part).model_copy(update={"gpus": SHARED})


def shared_by_needs(
    settings: Settings,
    shapes: Mapping[str, ModelShape | None],
    cards: Mapping[str, Mapping[str, Card | None]],
) -> Settings:
    """Return the settings in which engines of models that share one GPU have parts by their needs.

    Each gets its weights, its reserve and the KV of its longest sequence, and of the rest of the
    memory as much as its weights are of all; an encoder, or an engine whose KV is set, none. Parts
    stay equal where models share several GPUs, or one is not known. ``cards`` are by model and
    role, as in `gpu_layout.with_memory`. Raises `SettingsError` with the sums if they do not fit.
    """
    plans = {
        (name, role): one
        for name, own in settings.each.items()
        if own.gpus == SHARED
        for role, one in needed(own, shapes[name], cards[name]).items()
    }
    if sum(one.replicas * one.num_gpus for one in plans.values()) > 1:
        return settings
    least, weights, rest, usable = {}, {}, PARTS, 0.0
    for key, one in plans.items():
        if one.needs is None or one.budget_bytes is None:
            return settings
        usable = one.budget_bytes / one.num_gpus
        least[key] = math.ceil(PARTS * (one.needs.fixed_bytes + one.least_kv_bytes) / usable)
        grows = one.role != "encoder" and one.kv_bytes is None
        weights[key] = one.replicas * one.needs.weights_bytes if grows else 0
        rest -= one.replicas * least[key]
    if rest < 0:
        card = min(one.memory_bytes for some in cards.values() for one in some.values() if one)
        raise SettingsError(does_not_fit([*plans.values()], card, int(usable)))
    each = settings.each
    for (name, role), one in plans.items():
        more = rest * weights[name, role] // max(1, sum(weights.values())) // one.replicas
        part = (least[name, role] + more) / PARTS
        each = each | {name: _with_part(each[name], role, part)}
    return settings.with_each(each)
