"""The metrics of GPUs, in Prometheus' text format; none where there are no GPUs."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero.energy import PHASES, EnergyBook, GpuReading

_GPU = ("gpu", "role", "tier")


class EnergyMetrics(Collector):
    """Power, caps and energy, read from an `EnergyBook` at each scrape."""

    def __init__(self, book: EnergyBook) -> None:
        self._book = book

    def describe(self) -> list[Metric]:
        """None: what there is depends on the hardware."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges by GPU, and totals by role and tier."""
        if self._book.engines or self._book.joules:
            yield from self._gpus()
            yield from self._totals()

    def _gpus(self) -> Iterator[Metric]:
        power = _gauge("conserve_gpu_power_watts", "The board's power.")
        limit = _gauge("conserve_gpu_power_limit_watts", "The power limit that is set.")
        cap = _gauge("conserve_gpu_power_cap_watts", "The cap that ConServe holds.")
        busy = _gauge("conserve_gpu_utilisation", "Share of the time in which a kernel ran, 0-1.")
        heat = _gauge("conserve_gpu_temperature_celsius", "Of the chip.")
        refused = GaugeMetricFamily(
            "conserve_gpu_power_cap_refused",
            "1 where a cap was wanted and does not hold, by why; the node's log says what to do.",
            labels=[*_GPU, "reason"],
        )
        for gpu, labels in self._readings():
            values = (gpu.draw_w, gpu.limit_w, gpu.cap_w, gpu.utilisation, gpu.temperature_c)
            for family, value in zip((power, limit, cap, busy, heat), values, strict=True):
                if value is not None:
                    family.add_metric(labels, value)
            if gpu.refusal:
                refused.add_metric([*labels, gpu.refusal], 1)
        yield from (power, limit, cap, busy, heat, refused)

    def _readings(self) -> Iterator[tuple[GpuReading, list[str]]]:
        """Each GPU once, whoever shares it."""
        seen = set()
        for engine in self._book.engines.values():
            for gpu in engine.latest.gpus:
                if gpu.uuid not in seen:
                    seen.add(gpu.uuid)
                    yield gpu, [gpu.uuid, engine.role, engine.tier]

    def _totals(self) -> Iterator[Metric]:
        energy = CounterMetricFamily(
            "conserve_gpu_energy_joules",
            "Energy of the GPUs of each role, hence phase; waiting included.",
            labels=["role", "phase", "tier"],
        )
        for (role, tier), joules in self._book.joules.items():
            energy.add_metric([role, PHASES[role], tier], joules)
        yield energy
        yield GaugeMetricFamily(
            "conserve_gpu_energy_integrated",
            "1 where some of it was integrated from power samples, for want of a counter.",
            value=any(engine.latest.integrated for engine in self._book.engines.values()),
        )
        computed = CounterMetricFamily(
            "conserve_computed_tokens",
            "Tokens prefilled (not found in a cache) or decoded on GPUs whose energy is known.",
            labels=["tier"],
        )
        for tier, use in self._book.tiers.items():
            computed.add_metric([tier], use.tokens)
        yield computed
        each = GaugeMetricFamily(
            "conserve_tier_tokens_per_joule",
            "Tokens that a tier's engines prefilled or decoded, for each joule of its GPUs.",
            labels=["tier"],
        )
        for tier, use in self._book.tiers.items():
            if use.tokens_per_j is not None:
                each.add_metric([tier], use.tokens_per_j)
        yield each
        overall = self._book.overall.tokens_per_j
        if overall is not None:
            yield GaugeMetricFamily(
                "conserve_tokens_per_joule",
                "Tokens that engines prefilled or decoded, for each joule of their GPUs.",
                value=overall,
            )


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=_GPU)
