"""The metrics of `/metrics`, in Prometheus' text format."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.admission.waiting import WaitingLine
from conserve.conversations import ConversationTable
from conserve.costs import SpaceTimeCosts
from conserve.events import KINDS, EventLog
from conserve.pausing.memory import PAUSE_REASONS, RESTORES, Memory

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TBT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_WAIT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Metrics:
    """Counters and histograms of one application, and gauges read from its live state."""

    def __init__(
        self,
        table: ConversationTable,
        line: WaitingLine,
        replicas: Callable[[], dict[str, "ReplicaCounts"]] | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_LiveState(table, line))
        if replicas is not None:
            self._registry.register(Replicas(replicas))
        self.handoffs = self._counter(
            "conserve_handoffs", "Conversations whose KV a decoder took from LMCache."
        )
        self.handoff_tokens = self._counter(
            "conserve_handoff_tokens", "Tokens of KV that decoders took from LMCache."
        )
        self.late_handoffs = self._counter(
            "conserve_late_handoffs",
            "Prompts that a prefiller had just stored, and that were looked up more than once.",
        )
        self.missed_handoffs = self._counter(
            "conserve_missed_handoffs",
            "Prompts that a prefiller had just stored, and of which a decoder did not find all.",
        )
        self.missed_handoff_tokens = self._counter(
            "conserve_missed_handoff_tokens", "What they did not find, in tokens: computed twice."
        )
        self.cold_prefills = self._counter(
            "conserve_cold_prefills", "First turns' prompts prefilled on a prefiller."
        )
        self.cold_prefill_tokens = self._counter(
            "conserve_cold_prefill_tokens", "Input tokens of first turns prefilled on a prefiller."
        )
        self.cold_prefill_failures = self._counter(
            "conserve_cold_prefill_failures",
            "Remote prefills that failed; the decoder then prefilled by itself.",
        )
        self.later_prefills = self._counter(
            "conserve_later_prefills",
            "Later turns prefilled on a prefiller; none under placement conversation.",
        )
        self.prefiller_loaded_tokens = self._counter(
            "conserve_prefiller_loaded_tokens", "Tokens of KV that prefillers took from LMCache."
        )
        self.prompt_tokens = self._counter(
            "conserve_prompt_tokens", "Prompt tokens of completed turns, history included."
        )
        self.cached_tokens = self._counter(
            "conserve_decoder_cached_tokens",
            "Prompt tokens of completed turns found in the decoder's own prefix cache.",
        )
        self.output_tokens = self._counter(
            "conserve_output_tokens", "Tokens generated in completed turns."
        )
        self.moves = self._counter(
            "conserve_moves",
            "Conversations bound to another decoder: theirs was lost or left, or had no room.",
        )
        self.continued = self._counter(
            "conserve_stream_moves", "Streams that went on at another decoder."
        )
        self.engines_lost = self._counter("conserve_engines_lost", "Engines found dead.", ["role"])
        self.ended = self._counter(
            "conserve_conversations_ended", "Conversations that ended, by how.", ["reason"]
        )
        self.turns = self._counter("conserve_turns", "Turns, by outcome.", ["outcome"])
        self.later_turns = self._counter(
            "conserve_later_turns",
            "Later turns begun at a history's decoder: direct, or after the table was asked.",
            ["way"],
        )
        self.refusals = self._counter(
            "conserve_queue_refusals", "Conversations refused for want of room, by why.", ["reason"]
        )
        self.ttft_s = self._histogram(
            "conserve_ttft_seconds", "Time to first token of streamed turns.", _LATENCY_BUCKETS
        )
        self.ttfet_s = self._histogram(
            "conserve_ttfet_seconds",
            "Time to first effective token: from a conversation's first request to the first token "
            "of its first answer that is not a tool call.",
            _LATENCY_BUCKETS,
        )
        self.tbt_s = self._histogram(
            "conserve_tbt_seconds", "Time between tokens of streamed turns.", _TBT_BUCKETS
        )
        self.turn_latency_s = self._histogram(
            "conserve_turn_latency_seconds",
            "Turn latency, from the request's arrival to its last byte.",
            _LATENCY_BUCKETS,
        )
        self.queue_wait_s = self._histogram(
            "conserve_queue_wait_seconds",
            "How long new conversations waited for a decoder with room.",
            _WAIT_BUCKETS,
        )

    def add(self, collector: Collector) -> None:
        """Have something else collected as well."""
        self._registry.register(collector)

    def render(self) -> bytes:
        """The text that `/metrics` answers."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


class Replicas(Collector):
    """How many engines of each role there are, and are to be.

    Args:
        read: gives, by role, how many are alive, leaving and wanted, and, where a signal is
            observed, its name and the need that it says (engines that, fully used, would just be
            enough).
    """

    def __init__(self, read: Callable[[], dict[str, "ReplicaCounts"]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        actual = GaugeMetricFamily(
            "conserve_replicas", "Engines that take new work.", labels=["role"]
        )
        leaving = GaugeMetricFamily(
            "conserve_leaving_replicas",
            "Engines that only finish what they have.",
            labels=["role"],
        )
        wanted = GaugeMetricFamily(
            "conserve_wanted_replicas", "Engines that there are to be.", labels=["role"]
        )
        needed = GaugeMetricFamily(
            "conserve_needed_replicas",
            "Engines that, fully used, would just be enough, by the signal that decides.",
            labels=["role", "signal"],
        )
        for role, counts in self._read().items():
            actual.add_metric([role], counts.actual)
            leaving.add_metric([role], counts.leaving)
            wanted.add_metric([role], counts.wanted)
            if counts.needed is not None and counts.signal is not None:
                needed.add_metric([role, counts.signal], counts.needed)
        yield from (actual, leaving, wanted, needed)


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """One role's counts, for `Replicas`."""

    actual: int
    leaving: int
    wanted: int
    needed: float | None = None
    signal: str | None = None


class _LiveState(Collector):
    def __init__(self, table: ConversationTable, line: WaitingLine) -> None:
        self._table = table
        self._line = line

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        table = self._table
        phases = GaugeMetricFamily(
            "conserve_conversations", "Live histories of conversations, by phase.", labels=["phase"]
        )
        phases.add_metric(["reasoning"], table.reasoning)
        paused = 0 if table.memory is None else table.memory.paused
        phases.add_metric(["acting"], len(table) - table.reasoning - paused)
        phases.add_metric(["paused"], paused)
        yield phases
        if table.memory is not None:
            yield from _of_memory(table.memory)
        held = GaugeMetricFamily(
            "conserve_decoder_held_tokens",
            "Occupancy: tokens of KV held for live conversations.",
            labels=["decoder"],
        )
        capacity = GaugeMetricFamily(
            "conserve_decoder_capacity_tokens", "KV space, in tokens.", labels=["decoder"]
        )
        bound = GaugeMetricFamily(
            "conserve_decoder_conversations", "Conversations bound.", labels=["decoder"]
        )
        for decoder in table.decoders.values():
            held.add_metric([decoder.id], decoder.held_tokens)
            capacity.add_metric([decoder.id], decoder.capacity_tokens)
            bound.add_metric([decoder.id], decoder.conversations)
        yield from (held, capacity, bound)
        yield CounterMetricFamily(
            "conserve_expected_cached_tokens",
            "Tokens of prompts that decoders held by the account, as turns began.",
            value=table.expected_cached_tokens,
        )
        yield CounterMetricFamily(
            "conserve_missing_cached_tokens",
            "Of those, tokens that the engine did not have: how far account and engine are apart.",
            value=table.missing_cached_tokens,
        )
        queued = GaugeMetricFamily(
            "conserve_prefiller_queued_tokens",
            "Tokens of prefills sent to a prefiller and not yet done.",
            labels=["prefiller"],
        )
        for prefiller in table.prefillers.values():
            queued.add_metric([prefiller.id], prefiller.queued_tokens)
        yield queued
        yield GaugeMetricFamily(
            "conserve_queue_length",
            "Conversations that wait for a decoder with room.",
            value=len(self._line),
        )


class EventCounts(Collector):
    """How many events there were of each kind."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counted = CounterMetricFamily(
            "conserve_events", "What `GET /v1/events` has told, by kind.", labels=["kind"]
        )
        for kind in KINDS:
            counted.add_metric([kind], self._events.counts[kind])
        yield counted


class SpaceTimeMetrics(Collector):
    """Tells what decoders' KV space is used for.

    Args:
        look: called before they are read: notes what decoders hold now.
    """

    def __init__(self, costs: SpaceTimeCosts, look: Callable[[], None]) -> None:
        self._costs = costs
        self._look = look

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self._look()
        used = CounterMetricFamily(
            "conserve_cost_token_seconds",
            "KV space over time, in token-seconds, by what it is used for; turns that run are "
            "counted as they end.",
            labels=["decoder", "term"],
        )
        for decoder_id in self._costs.decoders:
            for term, cost in self._costs.terms(decoder_id).items():
                used.add_metric([decoder_id, term], cost)
        yield used
        yield CounterMetricFamily(
            "conserve_recomputed_tokens",
            "Tokens of prompts that were computed though their history had them before.",
            value=self._costs.recomputed_tokens,
        )


def _of_memory(memory: Memory) -> Iterator[Metric]:
    pauses = CounterMetricFamily(
        "conserve_pauses", "Idle histories that gave up their room, by why.", labels=["reason"]
    )
    for reason in PAUSE_REASONS:
        pauses.add_metric([reason], memory.pauses[reason])
    yield pauses
    yield CounterMetricFamily(
        "conserve_paused_tokens", "What they freed, in tokens.", value=memory.paused_tokens
    )
    restores = CounterMetricFamily(
        "conserve_restores",
        "Paused histories that came back: to their decoder, which had kept them, from host memory, "
        "to another decoder, or to theirs, to be computed again.",
        labels=["where"],
    )
    for where in RESTORES:
        restores.add_metric([where], memory.restores[where])
    yield restores
    yield GaugeMetricFamily(
        "conserve_parked_tokens",
        "Tokens of KV in host memory, from where histories can come back, as far as is known.",
        value=memory.parked_tokens,
    )
