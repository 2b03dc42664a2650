"""Measures engines' power in idle, prefill and decode, by the application's own joules.

Nodes report their GPUs' energy with each beat, and ``GET /metrics`` has the sums by role. A phase
is measured from one report to another, so their spacing costs no accuracy.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from autoscale.capacity.profile import CappedPower
from conserve_lab.cli.profile.measure import reaching

PHASE_S = 20.0
_POLL_S = 0.2
# Limits that differ by less count as equal.
_SAME_LIMIT_W = 1.0


class NoDraw(RuntimeError):
    """Power cannot be measured here, so that the profile has none."""


@dataclass(frozen=True, slots=True)
class Energy:
    """GPUs in ``GET /metrics``, by role: joules since the start, limits, and number of engines."""

    joules: dict[str, float]
    limits_w: dict[str, list[float]]
    engines: dict[str, int]


def parse_energy(text: str) -> Energy:
    joules: defaultdict[str, float] = defaultdict(float)
    limits_w: defaultdict[str, list[float]] = defaultdict(list)
    engines: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            role = sample.labels.get("role", "")
            if sample.name == "conserve_gpu_energy_joules_total":
                joules[role] += sample.value
            elif sample.name == "conserve_gpu_power_limit_watts":
                limits_w[role].append(sample.value)
            elif sample.name == "conserve_replicas":
                engines[role] = int(sample.value)
    return Energy(dict(joules), dict(limits_w), engines)


def one_limit_w(energy: Energy) -> float:
    """Return the limit under which both roles' engines are measured, in watts per engine.

    Raises `NoDraw` if GPUs report no energy, or have different limits.
    """
    roles = ("prefiller", "decoder")
    if not all(energy.joules.get(role) is not None and energy.limits_w.get(role) for role in roles):
        raise NoDraw("no GPU of both roles reports its energy")
    for role in roles:
        if energy.engines.get(role) != 1:
            raise NoDraw(
                f"there are {energy.engines.get(role, 0)} {role}s, and joules are known by role; "
                "serve one prefiller and one decoder"
            )
    prefiller_w, decoder_w = (sum(energy.limits_w[role]) for role in roles)
    if abs(prefiller_w - decoder_w) > _SAME_LIMIT_W:
        raise NoDraw(
            f"the prefiller's limit is {prefiller_w:g} W and the decoder's {decoder_w:g} W; "
            "serve both under the same one"
        )
    return prefiller_w


class DrawMeter:
    """Measures an application's power by role."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/metrics"

    async def energy(self) -> Energy:
        """Return what the application reports now; raises `MeasureError` if it does not answer."""
        with reaching(f"{self._url} does not answer"):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
                session.get(self._url) as answer,
            ):
                answer.raise_for_status()
                return parse_energy(await answer.text())

    async def limit_w(self) -> float:
        """Return the limit of `one_limit_w`, and raise as it does."""
        return one_limit_w(await self.energy())

    async def mean_w(
        self, role: str, work: Callable[[], Awaitable[object]], phase_s: float = PHASE_S
    ) -> float:
        """Return a role's mean power while ``work`` is repeated.

        Raises `NoDraw` if the joules did not advance twice within ``phase_s``.
        """

        async def over_and_over() -> None:
            while True:
                await work()

        working = asyncio.create_task(over_and_over())
        # Times and values at which the joules advanced; the first may include earlier work.
        seen: list[tuple[float, float]] = []
        latest = None
        ends_s = time.monotonic() + phase_s
        try:
            while time.monotonic() < ends_s:
                await asyncio.sleep(_POLL_S)
                if working.done():
                    await working
                joules = (await self.energy()).joules.get(role, 0.0)
                if latest is not None and joules != latest:
                    seen.append((time.monotonic(), joules))
                latest = joules
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        if len(seen) < 2:
            raise NoDraw(f"the {role}'s joules did not advance within {phase_s:g} s")
        (begun_s, first_j), (ended_s, last_j) = seen[0], seen[-1]
        return (last_j - first_j) / (ended_s - begun_s)


async def measure_power(
    meter: DrawMeter,
    prefill: Callable[[], Awaitable[object]],
    decode: Callable[[], Awaitable[object]],
    phase_s: float = PHASE_S,
) -> CappedPower:
    """Measure the power of idling, and of ``prefill`` and ``decode``, which each run for a moment.

    Raises `NoDraw` if power cannot be measured.
    """
    return CappedPower(
        cap_w=await meter.limit_w(),
        idle_w=await meter.mean_w("decoder", partial(asyncio.sleep, _POLL_S), phase_s),
        prefill_w=await meter.mean_w("prefiller", prefill, phase_s),
        decode_w=await meter.mean_w("decoder", decode, phase_s),
    )
