"""The metrics of engines' work."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
