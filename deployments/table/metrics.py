"""The metrics of `/metrics`, which the conversation table's process has.

`Metrics` declares those that are counted as things happen. `TABLE` and `APPLICATION` declare those
that are read from state at each scrape; `engine_metrics` has those of engines, `tenant_metrics`
those of tenants. `python -m scripts.reference` writes all of them into docs/reference/metrics.md.
"""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.admission.admission import WHYS
from conserve.clock import unix_s
from conserve.events import KINDS
from conserve.pausing.memory import PAUSE_REASONS, RESTORES, Memory
from conserve.pausing.prefetch import OUTCOMES
from conserve.turn import Outcome, TurnStats
from conserve.versions import installed
from conserve.wire import Role
from deployments.table.refusals import QUEUE_REASONS
from deployments.table_client import TABLE_UP

if TYPE_CHECKING:
    from deployments.table.accounts import Accounts

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TBT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_WAIT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 25, 60, 120)


class Described(NamedTuple):
    """A metric as docs/reference/metrics.md and dashboards name it."""

    name: str
    kind: str
    labels: Sequence[str]
    help: str


class Counted(NamedTuple):
    """A counter, and what a turn's record adds to it: by default, its field of that name."""

    name: str
    help: str
    read: Callable[[TurnStats], float] | None = None


HANDED_OFF = (
    Counted(
        "handoffs", "Conversations whose KV a decoder took from LMCache.",
        lambda stats: stats.lmcache_tokens > 0,
    ),
    Counted(
        "handoff_tokens", "Tokens of KV that decoders took from LMCache.",
        attrgetter("lmcache_tokens"),
    ),
    Counted(
        "late_handoffs",
        "Prompts just stored by a prefiller that a decoder had to look up more than once.",
        attrgetter("late"),
    ),
    Counted(
        "missed_handoffs",
        "Prompts just stored by a prefiller of which a decoder did not find all.",
        lambda stats: stats.missed_tokens > 0,
    ),
    Counted(
        "missed_handoff_tokens",
        "Tokens that decoders did not find of such prompts, and computed again.",
        attrgetter("missed_tokens"),
    ),
)  # fmt: skip
COMPLETED = (
    Counted("encoded_images", "Images that engines encoded for completed turns."),
    Counted(
        "node_images",
        "Images of completed turns that engines took from their node's memory, encoded.",
    ),
    Counted("prompt_tokens", "Prompt tokens of completed turns, history included."),
    Counted(
        "decoder_cached_tokens",
        "Prompt tokens of completed turns found in the decoder's own prefix cache.",
    ),
    Counted("output_tokens", "Tokens generated in completed turns."),
)


class Metrics:
    """The metrics of one application; ``groups`` are read from state (`Rows`).

    `described` are those that are counted as things happen.
    """

    def __init__(self, *groups: Collector) -> None:
        self._registry = CollectorRegistry()
        for group in groups:
            self._registry.register(group)
        self.described: list[Described] = []

        def described(kind: str, name: str, help: str, label: str) -> list[str]:
            labels = [label] if label else []
            self.described.append(Described(name, kind, labels, help))
            return labels

        def counter(name: str, help: str, label: str = "", values: Sequence[str] = ()) -> Counter:
            """Return a counter, which is 0 from the start for these values of its label.

            Otherwise `increase()` would not see the first event, since there was no 0 before it.
            """
            name = f"conserve_{name}"
            labels = described("counter", f"{name}_total", help, label)
            made = Counter(name, help, labels, registry=self._registry)
            for value in values:
                made.labels(value)
            return made

        def seconds(
            name: str, help: str, label: str = "", buckets: Sequence[float] = _LATENCY_BUCKETS
        ) -> Histogram:
            name = f"conserve_{name}_seconds"
            labels = described("histogram", name, help, label)
            return Histogram(name, help, labels, buckets=buckets, registry=self._registry)

        self._completed, self._handed_off = (
            [(counter(name, help), read or attrgetter(name)) for name, help, read in rows]
            for rows in (COMPLETED, HANDED_OFF)
        )
        self.cold_prefills = counter(
            "cold_prefills", "First turns' prompts prefilled on a prefiller."
        )
        self.cold_prefill_tokens = counter(
            "cold_prefill_tokens", "Input tokens of first turns prefilled on a prefiller."
        )
        self.cold_prefill_failures = counter(
            "cold_prefill_failures",
            "Remote prefills that failed; the decoder then prefilled by itself.",
        )
        self.later_prefills = counter(
            "later_prefills",
            "Later turns prefilled on a prefiller; none under placement conversation.",
        )
        self.prefiller_loaded_tokens = counter(
            "prefiller_loaded_tokens", "Tokens of KV that prefillers took from LMCache."
        )
        self.moves = counter(
            "moves",
            "Conversations bound to another decoder, because theirs was lost, left or had no room.",
        )
        self.continued = counter("stream_moves", "Streams that went on at another decoder.")
        self.rejoined = counter(
            "rejoined_turns", "Turns whose router was lost, and whose clients asked again."
        )
        self.engines_lost = counter("engines_lost", "Engines found dead.", "role", get_args(Role))
        self.ended = counter(
            "conversations_ended", "Conversations that ended, by reason.", "reason"
        )
        self.turns = counter("turns", "Turns, by outcome.", "outcome", get_args(Outcome))
        self.deadline = counter(
            "deadline", "Turns whose clients said until when, by whether that was kept.",
            "outcome", ("met", "missed"),
        )  # fmt: skip
        self.later_turns = counter(
            "later_turns",
            "Later turns begun at a history's decoder: direct, or after the table was asked.",
            "way", ("direct", "asked"),
        )  # fmt: skip
        self.refusals = counter(
            "queue_refusals",
            "Conversations refused for lack of room: the queue was full (queue_full), or the wait "
            "too long (timeout).",
            "reason", QUEUE_REASONS,
        )  # fmt: skip
        self.ttft_s = seconds("ttft", "Time to first token of streamed turns.")
        self.ttfet_s = seconds(
            "ttfet",
            "Time to first effective token: from a conversation's first request to the first token "
            "of its first answer that is not a tool call.",
        )
        self.tbt_s = seconds("tbt", "Time between tokens of streamed turns.", buckets=_TBT_BUCKETS)
        self.turn_latency_s = seconds(
            "turn_latency", "Turn latency, from the request's arrival to its last byte."
        )
        self.stage_s = seconds(
            "stage",
            "Time of completed turns in each stage on their decoder: until it had encoded their "
            "images (encode_wait) and encoding (encode), prefilling beside decodes (prefill), and "
            "from the first token to the last (decode). Only turns with a stage count.",
            "stage",
        )
        self.queue_wait_s = seconds(
            "queue_wait",
            "Time that new conversations waited for a decoder with room.",
            buckets=_WAIT_BUCKETS,
        )

    def completed(self, stats: TurnStats) -> None:
        for counted, read in self._completed:
            counted.inc(read(stats))
        for stage, took_s in stats.stages_s.items():
            self.stage_s.labels(stage).observe(took_s)
        self.handed_off(stats)

    def handed_off(self, stats: TurnStats) -> None:
        """Count what a decoder has taken from LMCache for a turn, complete or not."""
        for counted, read in self._handed_off:
            counted.inc(read(stats))

    def observed(self, stats: TurnStats, ttfet_s: float | None) -> None:
        self.turns.labels(stats.outcome).inc()
        self.continued.inc(stats.continued)
        if stats.in_time is not None and stats.outcome != "cancelled":
            self.deadline.labels("met" if stats.in_time else "missed").inc()
        if stats.outcome != "refused":
            self.turn_latency_s.observe(stats.latency_s)
        if stats.ttft_s is not None:
            self.ttft_s.observe(stats.ttft_s)
        for gap_s in stats.tbt_s:
            self.tbt_s.observe(gap_s)
        if ttfet_s is not None:
            self.ttfet_s.observe(ttfet_s)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


# --- metrics that are read from state -------------------------------------------------------------

_State = TypeVar("_State")
# A number, or for each sample its labels' values and then its number. A sample whose number is None
# is left out, and so is a metric without samples.
Samples = float | Iterable[tuple[Any, ...]] | None


@dataclass(frozen=True, slots=True)
class Row(Generic[_State]):
    """A metric whose values are read from a state at each scrape.

    Attributes:
        kind: `GAUGE` or `COUNTER`.
        read: gives its samples; see `Samples`.
    """

    kind: Any
    name: str
    help: str
    labels: Sequence[str]
    read: Callable[[_State], Samples]


@dataclass(eq=False)
class Rows(Collector, Generic[_State]):
    """Rows, and the state that they are read from."""

    rows: Sequence[Row[_State]]
    state: _State

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for row in self.rows:
            samples = row.read(self.state)
            family = row.kind(row.name, row.help, labels=row.labels)
            if samples is None or isinstance(samples, int | float):
                samples = [(samples,)]
            for *labels, value in samples:
                if value is not None:
                    family.add_metric([str(label) for label in labels], value)
            if family.samples:
                yield family


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


def _phases(seen: "Accounts") -> Samples:
    table = seen.table
    bound = sum(one.conversations for one in table.decoders.values())
    acting = bound - table.reasoning
    return [("reasoning", table.reasoning), ("acting", acting), ("paused", len(table) - bound)]


def _memory(read: Callable[[Memory], Samples]) -> Callable[["Accounts"], Samples]:
    return lambda seen: None if seen.table.memory is None else read(seen.table.memory)


def _waiting(seen: "Accounts") -> Samples:
    counts = Counts(why for _, why in seen.admission.waiting(unix_s()))
    return [(why, counts[why]) for why in WHYS]


def _needed(seen: "Accounts") -> Samples:
    needs = ((role, wanted.need) for role, wanted in seen.autoscaler.wanted.items())
    return [(role, need.signal, need.replicas) for role, need in needs if need is not None]


def _living(seen: "Accounts") -> Samples:
    counts = ((role, *seen.registry.living_and_leaving(role)) for role in seen.autoscaler.wanted)
    return [(role, living - leaving) for role, living, leaving in counts]


def _costs(seen: "Accounts") -> Samples:
    return [
        (decoder_id, term, cost)
        for decoder_id in seen.costs.decoders
        for term, cost in seen.costs.terms(decoder_id).items()
    ]


TABLE: tuple[Row["Accounts"], ...] = (
    Row(
        GAUGE, "conserve_conversations", "Live histories of conversations, by phase.",
        ("phase",), _phases,
    ),
    Row(
        COUNTER, "conserve_pauses", "Idle histories that gave up their room, by reason.",
        ("reason",), _memory(lambda memory: [(one, memory.pauses[one]) for one in PAUSE_REASONS]),
    ),
    Row(
        COUNTER, "conserve_paused_tokens", "Tokens of KV freed by pausing histories.",
        (), _memory(lambda memory: memory.paused_tokens),
    ),
    Row(
        COUNTER, "conserve_restores",
        "Paused histories that came back: to their decoder, which had kept them (kept), from host "
        "memory (reloaded), to another decoder (moved), or to be computed again (again).",
        ("where",), _memory(lambda memory: [(one, memory.restores[one]) for one in RESTORES]),
    ),
    Row(
        COUNTER, "conserve_prefetch",
        "Paused histories that were brought back before their turns: these found their KV (used), "
        "came while it was loaded (late), or did not come in time (dropped).",
        ("outcome",), _memory(lambda m: [(one, m.prefetches.outcomes[one]) for one in OUTCOMES]),
    ),
    Row(
        GAUGE, "conserve_parked_tokens",
        "Tokens of KV in host memory from where histories can come back, as far as is known.",
        (), _memory(lambda memory: memory.parked_tokens),
    ),
    Row(
        GAUGE, "conserve_decoder_held_tokens",
        "Occupancy: tokens of KV held for live conversations.",
        ("decoder",), lambda seen: [(d.id, d.held_tokens) for d in seen.table.decoders.values()],
    ),
    Row(
        GAUGE, "conserve_decoder_capacity_tokens", "KV space, in tokens.",
        ("decoder",),
        lambda seen: [(d.id, d.capacity_tokens) for d in seen.table.decoders.values()],
    ),
    Row(
        GAUGE, "conserve_decoder_conversations", "Conversations bound.",
        ("decoder",), lambda seen: [(d.id, d.conversations) for d in seen.table.decoders.values()],
    ),
    Row(
        COUNTER, "conserve_expected_cached_tokens",
        "Prompt tokens that decoders should have held when turns began, by the table's account.",
        (), lambda seen: seen.table.expected_cached_tokens,
    ),
    Row(
        COUNTER, "conserve_missing_cached_tokens",
        "Of conserve_expected_cached_tokens, tokens that the engine did not have.",
        (), lambda seen: seen.table.missing_cached_tokens,
    ),
    Row(
        GAUGE, "conserve_prefiller_queued_tokens",
        "Tokens of prefills sent to a prefiller and not yet done.",
        ("prefiller",),
        lambda seen: [(p.id, p.queued_tokens) for p in seen.table.prefillers.values()],
    ),
    Row(
        GAUGE, "conserve_queue_length", "Conversations that wait for a decoder with room.",
        (), lambda seen: len(seen.admission.queue),
    ),
    Row(
        GAUGE, "conserve_waiting",
        "Queued conversations, by reason: no decoder has room (room), as many are active as the "
        "window admits or memories keep (window), or others go first (order).",
        ("why",), _waiting,
    ),
    Row(
        GAUGE, "conserve_admission_window",
        "Number of histories that may be active; +Inf: as many as there is room for.",
        (), lambda seen: None if (window := seen.admission.window) is None else window.limit,
    ),
    Row(
        GAUGE, "conserve_working_tokens",
        "Tokens of histories that are worked on: a turn runs or waits, or the next is near.",
        (), _memory(lambda memory: memory.working.tokens),
    ),
    Row(
        GAUGE, "conserve_admission_pressure",
        "Pressures, from 0 to 1: of KV that is computed again (kv); and, which the window follows, "
        "of CPUs of the machine that environments run on (cpu), and of tools that take longer "
        "while many run (tools).",
        ("of",),
        lambda seen: asdict(window.pressure).items() if (window := seen.admission.window) else (),
    ),
    Row(
        GAUGE, "conserve_tools_running",
        "Tools that run, by clients' reports; without them, by the calls in answers.",
        (), lambda seen: seen.table.tools.times.running,
    ),
    Row(
        GAUGE, "conserve_active", "Active histories: a turn runs, or ended a moment ago.",
        (), lambda seen: seen.table.active(unix_s()),
    ),
    Row(GAUGE, "conserve_replicas", "Engines that take new work.", ("role",), _living),
    Row(
        GAUGE, "conserve_leaving_replicas", "Engines that only finish what they have.",
        ("role",),
        lambda seen: [
            (role, seen.registry.living_and_leaving(role)[1]) for role in seen.autoscaler.wanted
        ],
    ),
    Row(
        GAUGE, "conserve_wanted_replicas", "Engines that the autoscaler wants.",
        ("role",),
        lambda seen: [(role, seen.autoscaler.replicas(role)) for role in seen.autoscaler.wanted],
    ),
    Row(
        GAUGE, "conserve_lacked_gpus", "Of engines that find no room, where models share GPUs.",
        (), lambda seen: seen.autoscaler.lacks and seen.autoscaler.lacks.gpus,
    ),
    Row(
        GAUGE, "conserve_needed_replicas",
        "Engines that, fully used, would just be enough, by the signal that decides.",
        ("role", "signal"), _needed,
    ),
    Row(
        COUNTER, "conserve_events", "Events that `GET /v1/events` has told, by kind.",
        ("kind",), lambda seen: [(kind, seen.events.counts[kind]) for kind in KINDS],
    ),
    Row(
        COUNTER, "conserve_cost_token_seconds",
        "KV space over time, in token-seconds, by its use; a turn is counted when it ends.",
        ("decoder", "term"), _costs,
    ),
    Row(
        COUNTER, "conserve_recomputed_tokens",
        "Prompt tokens that were computed although their history had them before.",
        (), lambda seen: seen.costs.recomputed_tokens,
    ),
)  # fmt: skip


APPLICATION: tuple[Row[str], ...] = (
    Row(
        GAUGE, "conserve_build_info", "1, with the versions that run and the model's name.",
        ("version", "vllm", "lmcache", "ray", "model"),
        lambda model: [(*(found or "" for found in installed().values()), model, 1)],
    ),
    # A router answers 0 itself where the table does not answer a scrape.
    Row(GAUGE, *TABLE_UP, (), lambda _: 1),
)  # fmt: skip
