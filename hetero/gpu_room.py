"""Checks whether a cluster has as many GPUs as its engines ask for. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conserve.settings import RoleSettings, Settings, SettingsError
from hetero.gpu_layout import laid_out_by_hand, most_replicas, roles, workers
from hetero.tiers import NodeOffer, is_offered, role_tier

# Ray counts GPUs in ten-thousandths.
_LEAST = 1e-4


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
    """Return the most engines and workers that a node with so many GPUs may run."""
    engines = sum(most_replicas(own) for _, own in roles(settings))
    all_workers = sum(most_replicas(own) * workers(settings, own) for _, own in roles(settings))
    least = min(own.num_gpus for _, own in roles(settings))
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
    for name, own in roles(settings):
        asked = own.num_gpus
        if not _LEAST <= asked <= 1:
            raise SettingsError(
                f"{name}.num_gpus: {asked:g}: a worker has one GPU, or a part of one; for more, "
                "set engine.tensor_parallel_size"
            )
        if asked < 1 and workers(settings, own) > 1:
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
    for name, own in roles(settings):
        tier = role_tier(settings, own, gpu=True)
        places = tuple(index for index, node in enumerate(nodes) if is_offered(tier, node))
        if places:
            asked[name] = own
            one = _Engine(name, workers(settings, own), own.num_gpus, places)
            engines += [one] * own.replicas
    if _all_placed(engines, nodes):
        return []
    terms = [
        f"{own.replicas} {name if own.replicas > 1 else name[:-1]} x "
        f"{workers(settings, own) * own.num_gpus:g}"
        for name, own in asked.items()
    ]
    wanted = sum(own.replicas * workers(settings, own) * own.num_gpus for own in asked.values())
    within = {index for engine in engines for index in engine.nodes}
    there = sum(nodes[index].resources.get("GPU", 0) for index in within)
    said = f"GPUs: {' + '.join(terms)} = {wanted:g} are asked for, and Ray has {there:g}"
    if wanted <= there:
        said += (
            ", which do not hold them: an engine's workers are on one node, a part is of one GPU"
        )
    alone = settings.gpus is not None or laid_out_by_hand(settings)
    # Engines of several workers share no GPU.
    alone = alone or any(workers(settings, own) > 1 for own in asked.values())
    hint = "" if alone or not there else f", or have engines share them (gpus={int(there)})"
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
