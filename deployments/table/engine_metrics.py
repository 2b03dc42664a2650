"""The metrics of engines' work, and of their schedulers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.engine_scheduling import SchedulerLoad
from deployments.table.registry import Registry


class EngineLoads(Collector):
    """The loads of the engines that live, as each has told it with its last beat."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["engine", "role"]
        prompts = GaugeMetricFamily(
            "conserve_engine_prefill_tokens",
            "Tokens of prompts that an engine has and has not computed yet, beyond what caches "
            "should have.",
            labels=labels,
        )
        decodes = GaugeMetricFamily(
            "conserve_engine_decodes", "Requests past their first token.", labels=labels
        )
        step = GaugeMetricFamily(
            "conserve_engine_step_seconds",
            "How long an iteration without a prefill has taken, over 30 s.",
            labels=labels,
        )
        speed = GaugeMetricFamily(
            "conserve_engine_prefill_tokens_per_second",
            "How fast an engine has computed prompts while it had any, over 30 s.",
            labels=labels,
        )
        text = CounterMetricFamily(
            "conserve_engine_text_tokens",
            "Tokens of prompts' text, by whether an engine had tokenized it before (kept) or not.",
            labels=[*labels, "source"],
        )
        slots = GaugeMetricFamily(
            "conserve_engine_sm_slots",
            "Tenths of its GPU's SMs that an engine has to itself.",
            labels=labels,
        )
        sms = GaugeMetricFamily(
            "conserve_engine_sms", "SMs that an engine has to itself.", labels=labels
        )
        for engine_id, load in self._registry.loads.items():
            of = [engine_id, self._registry.engines[engine_id].role]
            prompts.add_metric(of, load.prefill_tokens)
            decodes.add_metric(of, load.decodes)
            # 0 stands for what is not known.
            if load.step_s:
                step.add_metric(of, load.step_s)
            if load.prefill_tokens_per_s:
                speed.add_metric(of, load.prefill_tokens_per_s)
            if load.new_text_tokens:
                text.add_metric([*of, "kept"], load.kept_text_tokens)
                text.add_metric([*of, "new"], load.new_text_tokens)
        yield from (prompts, decodes, step, speed, text)
        # Nothing of them where nobody asked for slots.
        for engine in self._registry.engines.values():
            if engine.sm_slots:
                slots.add_metric([engine.id, engine.role], engine.sm_slots)
                sms.add_metric([engine.id, engine.role], engine.sms)
        if slots.samples:
            yield from (slots, sms)


# --- engines' schedulers --------------------------------------------------------------------------


# By which class, under which name, what it is, by what it is told apart beside the engine, and what
# a scheduler says of it: a number, or several by that label; None where it has no such thing.
_FAMILIES: tuple[tuple[Any, str, str, str | None, Callable[[SchedulerLoad], Any]], ...] = (
    (
        GaugeMetricFamily, "waiting",
        "Calls that wait in an engine, by level; 0 goes first.", "level", lambda one: one.waiting,
    ),
    (
        GaugeMetricFamily, "running",
        "Calls that run in an engine, by level.", "level", lambda one: one.running,
    ),
    (
        GaugeMetricFamily, "running_kinds",
        "Calls that run: cold prefills, resumed ones, and decodes.", "kind",
        lambda one: one.running_kinds,
    ),
    (
        CounterMetricFamily, "begun",
        "Calls that have begun to run, by what they were then.", "kind", lambda one: one.begun,
    ),
    (
        CounterMetricFamily, "cut",
        "Chunks of prefills that were made smaller, or put off, for those who decode.", "kind",
        lambda one: one.cut,
    ),
    (
        CounterMetricFamily, "preempted",
        "Calls that were preempted, by level.", "level", lambda one: one.preempted,
    ),
    (
        CounterMetricFamily, "parts",
        "Prompts that have begun without room for all of them.", None, lambda one: one.parts,
    ),
    (
        CounterMetricFamily, "reclaimed_blocks",
        "Blocks kept between turns that were given up before their time.", None,
        lambda one: one.reclaimed_blocks,
    ),
    (
        GaugeMetricFamily, "pinned_blocks",
        "Blocks that are kept between turns.", None, lambda one: one.pinned_blocks,
    ),
    (
        GaugeMetricFamily, "free_blocks",
        "Blocks that nobody uses; what is cached in them may be evicted.", None,
        lambda one: one.free_blocks,
    ),
    (
        GaugeMetricFamily, "tpot_seconds",
        "Time per output token while prefills and decodes share steps, of late.", None,
        lambda one: one.tpot_s,
    ),
    (
        GaugeMetricFamily, "tpot_bound_seconds",
        "What that is kept below by cutting prefills.", None, lambda one: one.tpot_bound_s,
    ),
    (
        GaugeMetricFamily, "prefill_budget_tokens",
        "What a step may prefill beside decodes.", None, lambda one: one.budget_tokens,
    ),
    (
        GaugeMetricFamily, "lane_waiting",
        "Calls that wait for the prefill lane.", None, lambda one: one.lane_waiting,
    ),
    (
        GaugeMetricFamily, "lane_running",
        "Calls whose prompt is computed in the prefill lane.", None, lambda one: one.lane_running,
    ),
    (
        GaugeMetricFamily, "lane_tokens",
        "Tokens that are left to compute in the prefill lane.", None, lambda one: one.lane_tokens,
    ),
    (
        CounterMetricFamily, "lane_prefills",
        "Prefills that were in the lane: done, or failed and computed inline.", "outcome",
        lambda one: one.lane_prefills,
    ),
    (
        CounterMetricFamily, "lane_computed_tokens",
        "Tokens of prompts that were computed in the prefill lane.", None,
        lambda one: one.lane_computed_tokens,
    ),
    (
        GaugeMetricFamily, "decode_sms",
        "SMs that an engine's steps have; its prefill lane has the others of its slots.", None,
        lambda one: one.decode_sms,
    ),
)  # fmt: skip


class EngineSchedulers(Collector):
    """Tells what the schedulers of the engines that live have told with their last beats."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        loads = self._registry.schedulers
        if loads:
            yield from _of(loads)


def _of(loads: Mapping[str, SchedulerLoad]) -> Iterator[Metric]:
    for family, name, says, label, get in _FAMILIES:
        labels = ["engine", label] if label else ["engine"]
        metric: Any = family(f"conserve_engine_{name}", says, labels=labels)
        for engine, load in loads.items():
            found = get(load)
            if found is None:
                continue
            if not label:
                metric.add_metric([engine], found)
                continue
            by_key = found.items() if isinstance(found, dict) else enumerate(found)
            for key, value in by_key:
                metric.add_metric([engine, str(key)], value)
        if metric.samples:
            yield metric
