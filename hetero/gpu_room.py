"""Checks whether a cluster has the GPUs, and each GPU the SM slots, that engines ask for. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conserve.settings import RoleSettings, Settings, SettingsError
from hetero.gpu_layout import PARTS, laid_out_by_hand
from hetero.sm_units import SM_SLOTS
from hetero.tiers import NodeOffer, RoleTier, is_offered, role_tier

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
    """Return the most engines and workers, of all models, that a node with these GPUs may run."""
    roles = [(own, role) for own in settings.each.values() for _, role in own.roles]
    engines = sum(role.most_replicas for _, role in roles)
    all_workers = sum(role.most_replicas * own.workers_of(role) for own, role in roles)
    least = min(role.num_gpus for _, role in roles)
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
    terms = []
    wanted, divided = 0.0, False
    for own in settings.each.values():
        for name, role in own.roles:
            tier = role_tier(own, role, gpu=True)
            places = tuple(index for index, node in enumerate(nodes) if is_offered(tier, node))
            if places:
                one = _Engine(name, own.workers_of(role), role.num_gpus, places)
                engines += [one] * role.replicas
                of = f"{own.model_id} {name}" if own.models else name
                said = of if role.replicas > 1 else of[:-1]
                terms.append(f"{role.replicas} {said} x {one.workers * one.num_gpus:g}")
                wanted += role.replicas * one.workers * one.num_gpus
                divided |= one.workers > 1
    # Of several models, any may be placed first.
    if _all_placed(engines, nodes) and (
        not settings.models or _all_placed(engines, nodes, small_first=True)
    ):
        return []
    within = {index for engine in engines for index in engine.nodes}
    there = sum(nodes[index].resources.get("GPU", 0) for index in within)
    said = f"gpus: {' + '.join(terms)} = {wanted:g} are asked for, and Ray has {there:g}"
    if wanted <= there:
        said += (
            ", which do not hold them: an engine's workers are on one node, a part is of one GPU"
        )
    hint = ""
    if wanted <= there and settings.models:
        said += ", and small parts may come first"
        hint = ", or have parts that are equal (num_gpus)"
    elif divided:
        # They share no GPU.
        hint = ", or fewer GPUs for each (engine.tensor_parallel_size)"
    elif there and settings.gpus is None and not (settings.models or laid_out_by_hand(settings)):
        hint = f", or have engines share them (gpus={int(there)})"
    return [f"{said}; ask for fewer engines{hint}"]


def _all_placed(
    engines: Sequence[_Engine], nodes: Sequence[NodeOffer], small_first: bool = False
) -> bool:
    # The engines with the least choice go first, then the largest.
    free = [[1.0] * int(node.resources.get("GPU", 0)) for node in nodes]
    sign = 1 if small_first else -1
    ordered = sorted(engines, key=lambda one: (len(one.nodes), sign * one.workers * one.num_gpus))
    for engine in ordered:
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
    tier: RoleTier
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
    found = [one for some in settings.for_each(_sharing).values() for one in some]
    apart = len(found) == 2 and _are_apart(found[0].tier, found[1].tier)
    for group in [[one] for one in found] if apart else [found]:
        asked, chosen = _most_slots(group, PARTS)
        if asked > SM_SLOTS:
            terms = " + ".join(
                f"{number} {one.name if number > 1 else one.name[:-1]} x {one.slots}"
                for number, one in chosen
                if number
            )
            raise SettingsError(
                f"tiers.{group[-1].tier.name}.sm_slots: {terms} = {asked} slots may be asked of "
                f"one GPU, which has {SM_SLOTS}; give fewer slots, or larger parts by num_gpus"
            )


def _sharing(settings: Settings) -> list[_Sharing]:
    found = []
    for name, own in settings.roles:
        tier = role_tier(settings, own, gpu=True)
        if tier.sm_slots is None:
            continue
        _require_one_worker(settings, name, own)
        parts = max(1, round(min(1.0, own.num_gpus) * PARTS))
        said = f"{settings.model_id} {name}" if settings.models else name
        found.append(_Sharing(said, tier, tier.sm_slots, parts, own.most_replicas))
    return found


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


def _are_apart(one: RoleTier, other: RoleTier) -> bool:
    kinds = [
        {mark for mark in tier.resources if mark.startswith("accelerator_type:")}
        for tier in (one, other)
    ]
    # No node belongs to both tiers: Ray knows one kind of GPU and one value of each label per node.
    if all(kinds) and kinds[0] != kinds[1]:
        return True
    return any(other.labels.get(key, value) != value for key, value in one.labels.items())


def _most_slots(group: Sequence[_Sharing], parts: int) -> tuple[int, list[tuple[int, _Sharing]]]:
    """Return the most slots that engines on these parts of a GPU ask for, and their numbers."""
    if not group:
        return 0, []
    first, rest = group[0], group[1:]
    worst: tuple[int, list[tuple[int, _Sharing]]] = (-1, [])
    # Of the last ones, as many as fit ask for most.
    for number in range(0 if rest else first.fitting(parts), first.fitting(parts) + 1):
        asked, others = _most_slots(rest, parts - number * first.parts)
        asked += number * first.slots
        worst = max(worst, (asked, [(number, first), *others]), key=lambda found: found[0])
    return worst
