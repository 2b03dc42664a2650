"""Stand-in GPUs under the model's load, capped and metered by what a node's actor runs."""

import itertools
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.energy.model import Step
from hetero.energy import EnergyBook
from hetero.gpus import EngineUse, GpuKeeper
from hetero.power import Cap
from tests.nvml import library, standin

# The keeper's own period.
_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws what an A40 does without a cap, in watts. Assumed; the paper states caps alone.

    Attributes:
        prefill_w: draw of compute-bound work: all that the limit allows.
        decode_w: draw of memory-bound work: under the limit or at it.
    """

    idle_w: float = 30.0
    prefill_w: float = 300.0
    decode_w: float = 300.0


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of the rig: the role it serves, its GPUs' cap, and its engines' names."""

    role: str
    engines: tuple[str, ...]
    cap: Cap | None = None


@dataclass(slots=True)
class Accounted:
    """Tells what the accounting says.

    Attributes:
        role_j: energy accounted to each role.
        tier_tokens_per_j: tokens per joule that each tier's engines computed.
        true_j: what the stand-in's GPUs used by its own state.
        limits_w: the limits that held, by tier.
        after_w: the limits of all GPUs after the end.
    """

    role_j: dict[str, float] = field(default_factory=dict)
    tier_tokens_per_j: dict[str, float] = field(default_factory=dict)
    tokens_per_j: float = 0.0
    true_j: float = 0.0
    limits_w: dict[str, float] = field(default_factory=dict)
    after_w: set[float] = field(default_factory=set)

    @property
    def total_j(self) -> float:
        return sum(self.role_j.values())


class Rig:
    """Four stand-in A40s; this process sees no other GPUs from then on."""

    def __init__(self, folder: Path) -> None:
        library.load_here()
        self._folder = folder

    def account(
        self,
        tiers: Mapping[str, Tier],
        draw: Draw,
        steps: Iterable[tuple[float, Mapping[str, Step], Mapping[str, int]]],
        step_s: float,
    ) -> Accounted:
        """Run the GPUs through the model's steps, under the tiers' caps.

        Args:
            steps: for each, its end, what engines did in it, and the tokens that they have
                computed so far.
        """
        own = Path(tempfile.mkdtemp(dir=self._folder))
        engines = [name for tier in tiers.values() for name in tier.engines]
        machine = standin.Machine(own / "gpus", gpus=len(engines))
        os.environ.update(machine.environment())
        gpus = dict(zip(engines, machine.gpus, strict=True))
        keeper, book = GpuKeeper(own / "power"), EnergyBook()
        uses = {
            name: EngineUse(name, (gpus[name].id,), tier.cap)
            for tier in tiers.values()
            for name in tier.engines
        }
        of = {name: (tier.role, label) for label, tier in tiers.items() for name in tier.engines}
        counted = dict.fromkeys(engines, 0)

        def look(now_s: float, tokens: Mapping[str, int]) -> None:
            for use in uses.values():
                keeper.beat(use, now_s)
            keeper.tick(now_s)
            for name, use in uses.items():
                energy = keeper.beat(use, now_s)
                if energy is not None:
                    book.report(name, *of[name], energy, now_s)
                book.computed(name, tokens[name] - counted[name])
                counted[name] = tokens[name]

        accounted = Accounted()
        try:
            look(0.0, counted.copy())
            for label, tier in tiers.items():
                accounted.limits_w[label] = gpus[tier.engines[0]].limit_mw / 1e3
            before_uj = sum(gpu.energy_uj for gpu in machine.gpus)
            looked_s = now_s = 0.0
            tokens: Mapping[str, int] = counted
            for now_s, did, tokens in steps:
                _advance(machine, gpus, did, draw, step_s)
                if now_s - looked_s >= _TICK_S:
                    looked_s = now_s
                    look(now_s, tokens)
            look(now_s, tokens)
            accounted.true_j = (sum(gpu.energy_uj for gpu in machine.gpus) - before_uj) / 1e6
        finally:
            keeper.close()
        accounted.after_w = {gpu.limit_mw / 1e3 for gpu in machine.gpus}
        for (role, _), joules in book.joules.items():
            accounted.role_j[role] = accounted.role_j.get(role, 0.0) + joules
        accounted.tier_tokens_per_j = {
            label: use.tokens_per_j or 0.0 for label, use in book.tiers.items()
        }
        accounted.tokens_per_j = book.overall.tokens_per_j or 0.0
        return accounted


def _advance(
    machine: standin.Machine,
    gpus: Mapping[str, standin.StandInGpu],
    did: Mapping[str, Step],
    draw: Draw,
    step_s: float,
) -> None:
    """One step: each GPU prefills, then decodes, then idles, all side by side."""
    borders = {0.0, step_s}
    for step in did.values():
        borders |= {step.prefill_s, min(step_s, step.prefill_s + step.decode_s)}
    ordered = sorted(borders)
    for start_s, end_s in itertools.pairwise(ordered):
        for name, gpu in gpus.items():
            step = did[name]
            if start_s < step.prefill_s:
                watts = draw.prefill_w
            elif start_s < step.prefill_s + step.decode_s:
                watts = draw.decode_w
            else:
                watts = draw.idle_w
            gpu.load_mw = round(watts * 1e3)
        machine.advance(end_s - start_s)
