"""Checks whether engines that may share a GPU ask for more SM slots than it has. Pure."""

from dataclasses import dataclass

from conserve.settings import RoleSettings, Settings, SettingsError
from hetero.gpu_layout import most_replicas, roles, workers
from hetero.sm_units import SM_SLOTS
from hetero.tiers import role_tier

# Ray counts GPUs in ten-thousandths.
_PARTS = 10_000


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
    for name, own in roles(settings):
        slots = role_tier(settings, own, gpu=True).sm_slots
        if slots is None:
            continue
        _require_one_worker(settings, name, own)
        parts = max(1, round(min(1.0, own.num_gpus) * _PARTS))
        found.append(_Sharing(name, slots, parts, most_replicas(own)))
    apart = len(found) == 2 and _are_apart(settings)
    for group in [[one] for one in found] if apart else [found]:
        _require_ten(settings, group)


def _require_one_worker(settings: Settings, name: str, own: RoleSettings) -> None:
    if workers(settings, own) > 1:
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
    one, other = (role_tier(settings, own, gpu=True) for _, own in roles(settings))
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
    for count in range(first.fitting(_PARTS) + 1):
        left = _PARTS - count * first.parts
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
    raise SettingsError(
        f"tiers.{_tier_of(settings, group)}.sm_slots: {terms} = {asked} slots may be asked of one "
        f"GPU, which has {SM_SLOTS}; give fewer slots, or larger parts by num_gpus"
    )


def _tier_of(settings: Settings, group: list[_Sharing]) -> str:
    own: RoleSettings = getattr(settings, group[-1].name)
    assert own.tier is not None
    return own.tier
