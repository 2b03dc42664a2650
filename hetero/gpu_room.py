"""Checks whether a cluster has the GPUs, and each GPU the SM slots, that engines ask for. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conserve.settings import RoleSettings, Settings, SettingsError
from hetero.gpu_layout import PARTS, laid_out_by_hand
from hetero.sm_units import SM_SLOTS
from hetero.tiers import NodeOffer, is_offered, role_tier

_LEAST = 1 / PARTS


@dataclass(frozen=True, slots=True)
class Crowd:
    """The most engines, and workers of all of them, that may run on a node at a time."""

    engines: int
    workers: int

    @property
    def waiting(self) -> int:
        """Processes that spin while they wait for each other: engine cores and workers."""
        return self.engines + self.workers

    @property
    def processes(self) -> int:
        """All processes, with each engine's server: the least number of cores that vLLM advises."""
        return self.waiting + self.engines


def most_on_node(settings: Settings, gpus: float) -> Crowd:
    """Return the most engines and workers that a node with these GPUs may run."""
    engines = sum(own.most_replicas for _, own in settings.roles)
    all_workers = sum(own.most_replicas * settings.workers_of(own) for _, own in settings.roles)
    least = min(own.num_gpus for _, own in settings.roles)
    held = all_workers if least <= 0 else min(all_workers, math.floor(gpus / least + _LEAST))
    return Crowd(min(engines, held), held)


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine to be placed; all its workers go on one of ``nodes``."""

    name: str
    workers: int
    num_gpus: float
    nodes: tuple[int, ...]


def require_shares(settings: Settings) -> None:
    """Raise `SettingsError` for parts of GPUs that Ray or vLLM cannot give."""
    for name, own in settings.roles:
        asked = own.num_gpus
        if not _LEAST <= asked <= 1:
            raise SettingsError(
                f"{name}.num_gpus: {asked:g}: a worker has one GPU, or a part of one; for more, "
                "set engine.tensor_parallel_size"
            )
        if asked < 1 and settings.workers_of(own) > 1:
            raise SettingsError(
                f"{name}.num_gpus: {asked:g}: the workers of an engine with tensor_parallel_size "
                "or pipeline_parallel_size over 1 could get parts of the same GPU; give each 1"
            )


def short_of_gpus(settings: Settings, nodes: Sequence[NodeOffer]) -> list[str]:
    """Return a sentence with the sum if some engine cannot get the GPUs that it asks for.

    Busy GPUs count, and of roles that scale, the fewest engines. `tiers.missing` names roles whose
    tier no node offers.
    """
    engines: list[_Engine] = []
    asked: dict[str, RoleSettings] = {}
    for name, own in settings.roles:
        tier = role_tier(settings, own, gpu=True)
        places = tuple(index for index, node in enumerate(nodes) if is_offered(tier, node))
        if places:
            asked[name] = own
            one = _Engine(name, settings.workers_of(own), own.num_gpus, places)
            engines += [one] * own.replicas
    if _all_placed(engines, nodes):
        return []
    terms = [
        f"{own.replicas} {name if own.replicas > 1 else name[:-1]} x "
        f"{settings.workers_of(own) * own.num_gpus:g}"
        for name, own in asked.items()
    ]
    wanted = sum(own.replicas * settings.workers_of(own) * own.num_gpus for own in asked.values())
    within = {index for engine in engines for index in engine.nodes}
    there = sum(nodes[index].resources.get("GPU", 0) for index in within)
    said = f"gpus: {' + '.join(terms)} = {wanted:g} are asked for, and Ray has {there:g}"
    if wanted <= there:
        said += (
            ", which do not hold them: an engine's workers are on one node, a part is of one GPU"
        )
    hint = ""
    if any(settings.workers_of(own) > 1 for own in asked.values()):
        # They share no GPU.
        hint = ", or fewer GPUs for each (engine.tensor_parallel_size)"
    elif there and settings.gpus is None and not laid_out_by_hand(settings):
        hint = f", or have engines share them (gpus={int(there)})"
    return [f"{said}; ask for fewer engines{hint}"]


def _all_placed(engines: Sequence[_Engine], nodes: Sequence[NodeOffer]) -> bool:
    # The engines with the least choice go first, then the largest.
    free = [[1.0] * int(node.resources.get("GPU", 0)) for node in nodes]
    for engine in sorted(engines, key=lambda one: (len(one.nodes), -one.workers * one.num_gpus)):
        places = sorted(engine.nodes, key=lambda index: sum(free[index]))
        if not any(_take(free[index], engine) for index in places):
            return False
    return True


def _take(cards: list[float], engine: _Engine) -> bool:
    if engine.num_gpus < 1:
        fitting = [one for one, left in enumerate(cards) if left >= engine.num_gpus - _LEAST / 2]
        if fitting:
            fullest = min(fitting, key=lambda one: cards[one])
            cards[fullest] -= engine.num_gpus
        return bool(fitting)
    whole = [one for one, left in enumerate(cards) if left >= 1]
    if len(whole) < engine.workers:
        return False
    for one in whole[: engine.workers]:
        cards[one] = 0.0
    return True


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Engines of a role that may share a GPU; ``parts`` are ten-thousandths of it."""

    name: str
    slots: int
    parts: int
    most: int

    def fitting(self, parts: int) -> int:
        return min(self.most, parts // self.parts)


def require_slots(settings: Settings) -> None:
    """Raise `SettingsError` for SM slots that no GPU has, or that an engine could not keep to.

    Ray chooses the engines that share a GPU by ``num_gpus``, so every choice has to fit. An engine
    without slots runs on all SMs, and does not count.
    """
    found = []
    for name, own in settings.roles:
        slots = role_tier(settings, own, gpu=True).sm_slots
        if slots is None:
            continue
        _require_one_worker(settings, name, own)
        parts = max(1, round(min(1.0, own.num_gpus) * PARTS))
        found.append(_Sharing(name, slots, parts, own.most_replicas))
    apart = len(found) == 2 and _are_apart(settings)
    for group in [[one] for one in found] if apart else [found]:
        _require_ten(settings, group)


def _require_one_worker(settings: Settings, name: str, own: RoleSettings) -> None:
    if settings.workers_of(own) > 1:
        raise SettingsError(
            f"{name}.tier: {own.tier!r} has sm_slots, which are for engines of one worker; leave "
            "tensor_parallel_size and pipeline_parallel_size at 1, or sm_slots out"
        )
    given = settings.engine | own.engine
    for argument in ("worker_cls", "distributed_executor_backend"):
        if argument in given:
            raise SettingsError(
                f"{name}.engine.{argument} cannot be set: an engine with sm_slots (tier "
                f"{own.tier!r}) has a worker of its own, which Ray runs"
            )


def _are_apart(settings: Settings) -> bool:
    one, other = (
        role_tier(settings, own, gpu=True) for own in (settings.prefillers, settings.decoders)
    )
    kinds = [
        {mark for mark in tier.resources if mark.startswith("accelerator_type:")}
        for tier in (one, other)
    ]
    # No node belongs to both tiers: Ray knows one kind of GPU and one value of each label per node.
    if all(kinds) and kinds[0] != kinds[1]:
        return True
    return any(other.labels.get(key, value) != value for key, value in one.labels.items())


def _require_ten(settings: Settings, group: list[_Sharing]) -> None:
    """Refuse the engines that together ask the most of one GPU, if it is more than it has."""
    worst: tuple[int, list[tuple[int, _Sharing]]] = (0, [])
    first, rest = (group[0], group[1:]) if group else (None, [])
    if first is None:
        return
    for count in range(first.fitting(PARTS) + 1):
        left = PARTS - count * first.parts
        chosen = [(count, first)] + [(one.fitting(left), one) for one in rest]
        asked = sum(number * one.slots for number, one in chosen)
        worst = max(worst, (asked, chosen), key=lambda found: found[0])
    asked, chosen = worst
    if asked <= SM_SLOTS:
        return
    terms = " + ".join(
        f"{number} {one.name if number > 1 else one.name[:-1]} x {one.slots}"
        for number, one in chosen
        if number
    )
    own: RoleSettings = getattr(settings, group[-1].name)
    raise SettingsError(
        f"tiers.{own.tier}.sm_slots: {terms} = {asked} slots may be asked of one "
        f"GPU, which has {SM_SLOTS}; give fewer slots, or larger parts by num_gpus"
    )
