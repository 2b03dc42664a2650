"""Divides GPUs among models: which have GPUs of their own, and who shares one. Pure.

Ray places engines by ``num_gpus`` alone, and each keeps to its part, so memory suffices wherever
they go. But of engines with different parts on several GPUs, small ones may be where a large one
has no room then: two of 0.4 on the GPU that one of 0.6 needs. So models share either one GPU, in
parts by what each needs, or several in equal parts.
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

    A model has as many GPUs as its engines ask for, or one. The rest go, one engine at a time, to
    the model with the largest weights for each GPU that it would then have, if its decoders are not
    counted yet. Where there are too few for that, models that need a GPU share those left.

    Args:
        weights: bytes by model. Where one is not known, all count as equal.

    Raises:
        SettingsError: some model gets no GPU.
    """
    each = settings.each
    if len(each) == 1 or not gpus:
        return settings.with_each(settings.for_each(lambda own: with_counts(own, gpus)))
    if not all(map(weights.get, each)):
        weights = dict.fromkeys(each, 1)
    parts = settings.for_each(_least_gpus)
    by_hand = {name for name, own in each.items() if laid_out_by_hand(own)}
    sharing = [name for name, own in each.items()
               if name not in by_hand and own.gpus is None and parts[name] == 1
               and all(role.max_replicas is None for _, role in own.roles)]  # fmt: skip
    fixed = {name: part for name, part in parts.items() if name not in sharing}
    left = gpus - math.ceil(sum(fixed.values()) - 1 / PARTS)
    if left < min(1, len(sharing)):
        asked = [f"{part:g} for {name}" for name, part in fixed.items()]
        asked += [f"1 for {' and '.join(sharing)}"] if sharing else []
        raise SettingsError(
            f"gpus: {' + '.join(asked)} = {gpus - left + min(1, len(sharing))} are asked for, and "
            f"Ray has {gpus}; use more GPUs, or ask for fewer engines (prefillers=0 decoders=1 is "
            "the least; models of one engine share a GPU where they ask for none by gpus)"
        )
    groups: list[list[str]] = [[] for _ in range(left)]
    for name in sorted(sharing, key=lambda name: -weights[name]):
        min(groups, key=lambda one: sum(weights[other] for other in one)).append(name)
    rest = left - len(sharing)
    steps = {name: own.workers_of(own.decoders) for name, own in each.items()
             if name not in by_hand and own.gpus is None and not is_given(own, "decoders")}  # fmt: skip
    while fitting := [name for name, step in steps.items() if step <= rest]:
        most = max(fitting, key=lambda name: weights[name] / (parts[name] + steps[name]))
        parts[most] += steps[most]
        rest -= steps[most]
    chosen = settings.for_each(lambda own: with_counts(own, int(parts[own.model_id])))
    crowds = [[chosen[name] for name in group] for group in groups if len(group) > 1]
    engines = [sum(role.replicas for own in one for _, role in own.roles) for one in crowds]
    for own in (own for crowd in crowds for own in crowd):
        equal = {name: floor_part(1 / max(engines)) for name, _ in own.roles}
        chosen[own.model_id] = with_parts(own, equal)
    return settings.with_each(chosen)


def with_parts(settings: Settings, parts: Mapping[str, float]) -> Settings:
    """Return a model's settings with these parts of a GPU, by role, of one that models share."""
    for name, part in parts.items():
        settings = update(settings, name, num_gpus=part)
    return settings.model_copy(update={"gpus": SHARED})


def _least_gpus(settings: Settings) -> float:
    """Return the GPUs with which a model has the engines that it asks for, or one."""
    if laid_out_by_hand(settings):
        return _asked(settings)
    return next(gpus for gpus in count(1) if _asked(with_counts(settings, gpus)) <= gpus)


def _asked(settings: Settings) -> float:
    roles = [own for _, own in settings.roles]
    return sum(own.replicas * settings.workers_of(own) * own.num_gpus for own in roles)


def shared_by_needs(
    settings: Settings,
    shapes: Mapping[str, ModelShape | None],
    cards: Mapping[str, Mapping[str, Card | None]],
) -> Settings:
    """Return the settings in which engines of models that share one GPU have parts by their needs.

    Each gets its weights, its reserve and the KV of its longest sequence, and of the rest of the
    memory as much as its weights are of all. An encoder, or an engine whose KV is set, gets none of
    it. Parts stay equal where models share several GPUs, or one is not known.

    Args:
        settings: from `divided`.
        shapes: by model.
        cards: by model and role, as in `gpu_layout.with_memory`.

    Raises:
        SettingsError: they do not fit; with the sums.
    """
    shared = {name: own for name, own in settings.each.items() if own.gpus == SHARED}
    if not shared or sum(map(_asked, shared.values())) > 1:
        return settings
    plans = {
        (name, role): one
        for name, own in shared.items()
        for role, one in needed(own, shapes[name], cards[name]).items()
    }
    least, growing = {}, dict.fromkeys(plans, 0)
    for key, one in plans.items():
        card = cards[key[0]][key[1]]
        if one.needs is None or one.budget_bytes is None or card is None:
            return settings
        usable = one.budget_bytes / one.num_gpus
        least[key] = math.ceil(PARTS * (one.needs.fixed_bytes + one.least_kv_bytes) / usable)
        if one.role != "encoder" and one.kv_bytes is None:
            growing[key] = one.needs.weights_bytes
    rest = PARTS - sum(plans[key].replicas * part for key, part in least.items())
    if rest < 0:
        raise SettingsError(does_not_fit(list(plans.values()), card.memory_bytes, int(usable)))
    total = sum(plans[key].replicas * weights for key, weights in growing.items())
    parts = {key: (part + rest * growing[key] // max(1, total)) / PARTS
             for key, part in least.items()}  # fmt: skip
    chosen = {name: with_parts(own, {role: parts[name, role] for role, _ in own.roles})
              for name, own in shared.items()}  # fmt: skip
    return settings.with_each(settings.each | chosen)
