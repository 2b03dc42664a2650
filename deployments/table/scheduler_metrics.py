"""What engines' schedulers tell, where they know conversations, for `/metrics`."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.engine_scheduling import SchedulerLoad
from deployments.table.registry import Registry


class EngineSchedulers(Collector):
    """What the schedulers of the engines that live have told with their last beats."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        loads = self._registry.schedulers
        if loads:
            yield from _of(loads)


def _of(loads: Mapping[str, SchedulerLoad]) -> Iterator[Metric]:
    yield _by(
        GaugeMetricFamily,
        "waiting",
        "Calls that wait in an engine, by level; 0 goes first.",
        "level",
        {engine: dict(enumerate(load.waiting)) for engine, load in loads.items()},
    )
    yield _by(
        GaugeMetricFamily,
        "running",
        "Calls that run in an engine, by level.",
        "level",
        {engine: dict(enumerate(load.running)) for engine, load in loads.items()},
    )
    yield _by(
        GaugeMetricFamily,
        "running_kinds",
        "Calls that run: cold prefills, resumed ones, and decodes.",
        "kind",
        {engine: load.running_kinds for engine, load in loads.items()},
    )
    yield _by(
        CounterMetricFamily,
        "begun",
        "Calls that have begun to run, by what they were then.",
        "kind",
        {engine: load.begun for engine, load in loads.items()},
    )
    yield _by(
        CounterMetricFamily,
        "cut",
        "Chunks of prefills that were made smaller, or put off, for those who decode.",
        "kind",
        {engine: load.cut for engine, load in loads.items()},
    )
    yield _by(
        CounterMetricFamily,
        "preempted",
        "Calls that were preempted, by level.",
        "level",
        {engine: dict(enumerate(load.preempted)) for engine, load in loads.items()},
    )
    yield _plain(
        CounterMetricFamily,
        "parts",
        "Prompts that have begun without room for all of them.",
        {engine: load.parts for engine, load in loads.items()},
    )
    yield _plain(
        CounterMetricFamily,
        "reclaimed_blocks",
        "Blocks kept between turns that were given up before their time.",
        {engine: load.reclaimed_blocks for engine, load in loads.items()},
    )
    yield _plain(
        GaugeMetricFamily,
        "pinned_blocks",
        "Blocks that are kept between turns.",
        {engine: load.pinned_blocks for engine, load in loads.items()},
    )
    yield _plain(
        GaugeMetricFamily,
        "free_blocks",
        "Blocks that nobody uses; what is cached in them may be evicted.",
        {engine: load.free_blocks for engine, load in loads.items()},
    )
    yield _plain(
        GaugeMetricFamily,
        "tpot_seconds",
        "Time per output token while prefills and decodes share steps, of late.",
        {engine: load.tpot_s for engine, load in loads.items()},
    )
    yield _plain(
        GaugeMetricFamily,
        "tpot_bound_seconds",
        "What that is kept below by cutting prefills.",
        {engine: load.tpot_bound_s for engine, load in loads.items()},
    )
    yield _plain(
        GaugeMetricFamily,
        "prefill_budget_tokens",
        "What a step may prefill beside decodes.",
        {engine: load.budget_tokens for engine, load in loads.items()},
    )


def _by(
    family: Any, name: str, says: str, label: str, engines: Mapping[str, Mapping[Any, int]]
) -> Metric:
    metric: Any = family(f"conserve_engine_{name}", says, labels=["engine", label])
    for engine, values in engines.items():
        for key, value in values.items():
            metric.add_metric([engine, str(key)], value)
    return metric  # type: ignore[no-any-return]


def _plain(family: Any, name: str, says: str, engines: Mapping[str, float]) -> Metric:
    metric: Any = family(f"conserve_engine_{name}", says, labels=["engine"])
    for engine, value in engines.items():
        metric.add_metric([engine], value)
    return metric  # type: ignore[no-any-return]
