"""Measures how fast the conversation table decides, and what a live conversation costs in memory.

A `ConversationTable` is filled to each size, and then conversations come and go at random, as they
would with that many alive. One core, no Ray: this is what the table's actor computes for a turn,
not what a call to it costs.

Every size runs in a fresh process, so that memory is its own, and the sizes take turns for several
rounds, so that a busy machine slows all of them alike; medians are reported.

A cycle is one short-lived conversation: ``release`` of a random live one, then ``bind``,
``prefilled`` and ``advance`` of a new one in its place. Ids and digests are made outside of the
measured time and are fresh objects for every call, as they are when they come over the network:
near at hand for the caller, but equal at most to what the table keeps.
"""

import gc
import json
import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.box import SIMPLE_HEAD

from conserve.conversations import MEMORY_ENVIRONMENT, ConversationTable
from conserve.histories.kinship import Opening
from conserve.pausing import Pausing
from conserve.placement import ConversationPlacement
from conserve.recognition import Chain, Digest, chain_of
from conserve.turn import TurnKey, TurnStats
from experiments.harness import Experiment, answer, at_least_1

TARGET_CYCLES_PER_S = 50_000
TARGET_BYTES = 1_000
TARGET_SLOWDOWN = 1.5

_DECODERS = 8
_PREFILLERS = 2
# Of a conversation, at most: a prompt and its answer.
_MOST_TOKENS = 61_000
_IDLE_TIMEOUT_S = 1800.0

# Fewer do not fill the memory that is taken at once.
_MEASURABLE = 50_000
_BATCH = 2_000
_LATENCY_SAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one size.

    Attributes:
        cycles_per_s: conversations that came and went in a second.
        cycle_p50_us, cycle_p99_us: duration of single cycles. The slowdown is told from the median,
            which neither other processes nor the collector's pauses move much.
        begin_us, recognise_us: median latency of the call, for a random live conversation.
        chain_ms: median time in which a router makes the digests of a turn of 501 messages.
        bytes_each: growth of the resident memory for each live conversation.
        gc_pause_ms: duration of a full run of Python's cyclic garbage collector, with all of them
            alive.
        cycles_per_s_frozen: the same as `cycles_per_s`, after ``gc.freeze()``.
    """

    size: int
    cycles_per_s: float
    cycle_p50_us: float
    cycle_p99_us: float
    begin_us: float
    recognise_us: float
    chain_ms: float
    bytes_each: float
    gc_pause_ms: float
    cycles_per_s_frozen: float


# --- One size, in a process of its own ------------------------------------------------------------


def measure(size: int, seconds: float, pausing: bool = False) -> Sample:
    """Fill a table to ``size`` live conversations, and measure it for about ``seconds``.

    Args:
        pausing: whether the table keeps account of what engines have, as it does where idle
            conversations are paused; none is here.
    """
    population = _Population(size, random.Random(size), pausing)
    gc.collect()
    before_bytes = _resident_bytes()
    population.fill()
    gc.collect()
    bytes_each = (_resident_bytes() - before_bytes) / size
    gc_pause_s = _timed_s(gc.collect)
    cycles_per_s, cycle_p50_s, cycle_p99_s = population.cycles(seconds)
    begin_s = population.begin_latency()
    recognise_s = population.recognise_latency()
    gc.freeze()
    frozen_cycles_per_s, _, _ = population.cycles(seconds / 3)
    if len(population.table) != size or population.table.reasoning:
        raise RuntimeError("the table lost count; this measurement means nothing")
    return Sample(
        size=size,
        cycles_per_s=cycles_per_s,
        cycle_p50_us=cycle_p50_s * 1e6,
        cycle_p99_us=cycle_p99_s * 1e6,
        begin_us=begin_s * 1e6,
        recognise_us=recognise_s * 1e6,
        chain_ms=_chain_s() * 1e3,
        bytes_each=bytes_each,
        gc_pause_ms=gc_pause_s * 1e3,
        cycles_per_s_frozen=frozen_cycles_per_s,
    )


_Newcomer = tuple[str, str, str, TurnStats, tuple[Digest, ...], Opening]


class _Population:
    """The live conversations, kept in 8 bytes each: ids and digests follow from a number.

    So looking for a victim does not bring the table's own objects into the processor's caches.
    """

    def __init__(self, size: int, random_: random.Random, pausing: bool) -> None:
        self._random = random_
        self._alive = array("q", range(size))
        self._next = size
        self._clock_s = 1_700_000_000.0
        self.table = ConversationTable(
            ConversationPlacement(),
            _IDLE_TIMEOUT_S,
            first_id=1_700_000_000_000,
            pausing=Pausing() if pausing else None,
        )
        # With some room left, and so none that an engine would keep what has ended in for ever.
        capacity_tokens = _MOST_TOKENS * size // _DECODERS
        for i in range(_DECODERS):
            self.table.add_decoder(f"decoder#{i}", max(capacity_tokens, _MOST_TOKENS))
        for i in range(_PREFILLERS):
            self.table.add_prefiller(f"prefiller#{i}")

    def fill(self) -> None:
        for number in self._alive:
            self._arrive(*self._newcomer(number))

    def cycles(self, seconds: float) -> tuple[float, float, float]:
        """Cycles a second; the median and the 99th percentile of a cycle in seconds."""
        each: list[float] = []
        clock = time.perf_counter
        total_s = 0.0
        while total_s < seconds:
            batch = [self._replacement() for _ in range(_BATCH)]
            began_s = clock()
            last_s = began_s
            for victim, newcomer in batch:
                self.table.release(victim)
                self._arrive(*newcomer)
                now_s = clock()
                each.append(now_s - last_s)
                last_s = now_s
            total_s += last_s - began_s
        percentiles = quantiles(each, n=100)
        return len(each) / total_s, percentiles[49], percentiles[98]

    def begin_latency(self) -> float:
        """Median seconds of ``begin`` for a known conversation; its turn is ended unmeasured."""

        def turn(number: int) -> Callable[[], None]:
            history_id = _conversation_id(number)
            return lambda: _consume(self.table.begin(history_id, self._clock_s))

        def end(number: int) -> None:
            conversation = self.table.get(_conversation_id(number))
            assert conversation is not None
            decoder_id, stats = conversation.home or "", self._stats()
            tails = (_digest(number),)
            self.table.advance(conversation.newest_turn, decoder_id, stats, tails, self._clock_s)

        return self._latency(turn, end)

    def recognise_latency(self) -> float:
        """Median seconds of ``recognise`` for a turn whose second end is a tail."""
        size = 2 * self._next

        def turn(number: int) -> Callable[[], None]:
            chain = Chain(_digest(~number), None, [_digest(-number - size), _digest(number)])
            return lambda: _consume(self.table.recognise(chain))

        return self._latency(turn, lambda number: None)

    def _latency(
        self, call: Callable[[int], Callable[[], None]], after: Callable[[int], None]
    ) -> float:
        seen = []
        left = min(_LATENCY_SAMPLES, 20 * len(self._alive))
        while left > 0:
            # They are distinct: a second visit to a conversation would find it in the caches.
            chosen = self._random.sample(self._alive, min(_BATCH, len(self._alive), left))
            left -= len(chosen)
            for number, run in [(number, call(number)) for number in chosen]:
                seen.append(_timed_s(run))
                after(number)
        return median(seen)

    def _replacement(self) -> tuple[str, "_Newcomer"]:
        slot = self._random.randrange(len(self._alive))
        victim = _conversation_id(self._alive[slot])
        self._alive[slot] = self._next
        self._next += 1
        return victim, self._newcomer(self._alive[slot])

    def _newcomer(self, number: int) -> "_Newcomer":
        # Three calls over the network bring the id three times.
        return (
            _conversation_id(number),
            _conversation_id(number),
            _conversation_id(number),
            self._stats(),
            (_digest(number),),
            Opening(Chain(_digest(~number), None, (), ends_with_root=True)),
        )

    def _stats(self) -> TurnStats:
        prompt_tokens = self._random.randrange(1_000, 60_000)
        return TurnStats(
            prompt_tokens, self._random.randrange(1, 900), 0, prompt_tokens // 256 * 256
        )

    def _arrive(
        self,
        id_at_bind: str,
        id_at_prefilled: str,
        id_at_advance: str,
        stats: TurnStats,
        tails: tuple[Digest, ...],
        opening: Opening,
    ) -> None:
        self._clock_s += 1e-4
        placement = self.table.bind(id_at_bind, stats.prompt_tokens, self._clock_s, None, opening)
        assert placement is not None
        conversation = self.table.get(id_at_bind)
        assert conversation is not None
        # Plus nothing: an equal number, but not the table's own object.
        incarnation, turn_id = conversation.incarnation + 0, conversation.running[-1] + 0
        self.table.prefilled(TurnKey(id_at_prefilled, incarnation, turn_id))
        self._clock_s += 1e-4
        turn = TurnKey(id_at_advance, incarnation, turn_id)
        self.table.advance(turn, placement.decoder_id, stats, tails, self._clock_s)


def _chain_s() -> float:
    """Median seconds to make the digests of a chat of 501 messages, tool calls among them."""
    messages: list[dict[str, object]] = [{"role": "system", "content": "word " * 1000}]
    for number in range(125):
        call = {"name": "look_up", "arguments": json.dumps({"number": number})}
        calls = [{"id": f"call-{number}", "type": "function", "function": call}]
        messages += [
            {"role": "user", "content": f"{number} " + "word " * 60},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call-{number}", "content": "word " * 120},
            {"role": "assistant", "content": f"{number} " + "word " * 40},
        ]
    return median(_timed_s(lambda: chain_of(messages, most_ends=64)) for _ in range(50))


def _timed_s(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def _conversation_id(number: int) -> str:
    # Ids look as `conserve.identity.new_id` makes them. The factor scatters neighbours.
    return f"conv-{number * 0x9E3779B97F4A7C15F39CC0605 % 2**96:024x}"


def _digest(number: int) -> Digest:
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")


def _consume(found: object) -> None:
    if found is None:
        raise RuntimeError("a live conversation was not found; this measurement means nothing")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- All sizes, in turns --------------------------------------------------------------------------


def verdicts(samples: Sequence[Sample]) -> list[tuple[str, str, str, bool]]:
    """Return each target, what was measured against it in the worst of the sizes, and whether it is
    met."""
    slowest = min(sample.cycles_per_s for sample in samples)
    largest = max(sample.bytes_each for sample in samples if sample.size >= _MEASURABLE)
    by_size = sorted(samples, key=lambda sample: sample.size)
    low, high = by_size[0], by_size[-1]
    slowdown = high.cycle_p50_us / low.cycle_p50_us
    return [
        (
            "cycles a second, any size",
            f">= {TARGET_CYCLES_PER_S:,}",
            f"{slowest:,.0f}",
            slowest >= TARGET_CYCLES_PER_S,
        ),
        (
            "bytes a conversation, any size",
            f"< {TARGET_BYTES:,}",
            f"{largest:,.0f}",
            largest < TARGET_BYTES,
        ),
        (
            f"median cycle, {high.size:,} against {low.size:,}",
            f"<= {TARGET_SLOWDOWN:g}x",
            f"{slowdown:.2f}x",
            slowdown <= TARGET_SLOWDOWN,
        ),
    ]


_COLUMNS: dict[str, Callable[[Sample], str]] = {
    "live": lambda one: f"{one.size:,}",
    "cycles\n/s": lambda one: f"{one.cycles_per_s:,.0f}",
    "p50\nus": lambda one: f"{one.cycle_p50_us:.1f}",
    "p99\nus": lambda one: f"{one.cycle_p99_us:.1f}",
    "begin\nus": lambda one: f"{one.begin_us:.2f}",
    "recog.\nus": lambda one: f"{one.recognise_us:.2f}",
    "chain\nms": lambda one: f"{one.chain_ms:.1f}",
    "bytes\neach": lambda one: f"{one.bytes_each:,.0f}" if one.size >= _MEASURABLE else "-",
    "full gc\nms": lambda one: f"{one.gc_pause_ms:,.1f}",
    "frozen\n/s": lambda one: f"{one.cycles_per_s_frozen:,.0f}",
}


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("table", __doc__, rounds=3)
    sizes = [1_000, 100_000, 1_000_000]
    experiment.option("--sizes", sizes, "live conversations", type=at_least_1, metavar="N")
    experiment.option("--seconds", 1.2, "of cycles a size and round")
    add = experiment.parser.add_argument
    add("--pausing", action="store_true", help="with the account that pausing needs")
    experiment.hidden("--measure", type=int)
    options = experiment.parse(arguments)
    if options.measure is not None:
        answer(lambda: measure(options.measure, options.seconds, options.pausing))
        return
    if max(options.sizes) < _MEASURABLE:
        experiment.parser.error(f"one size must be at least {_MEASURABLE}, to measure memory")
    if min(options.sizes) < 2 or options.seconds <= 0:
        experiment.parser.error("sizes must be at least 2, seconds positive")
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in options.sizes}
    more = ["--seconds", options.seconds, *(["--pausing"] if options.pausing else [])]
    for size in experiment.track(options.sizes * options.rounds):
        # The table's actor runs with the same memory settings; see `MEMORY_ENVIRONMENT`.
        sample = experiment.in_own_process("--measure", size, *more, environment=MEMORY_ENVIRONMENT)
        found[size].append(sample)
    samples = [
        Sample(**{name: median(one[name] for one in ones) for name in ones[0]} | {"size": size})
        for size, ones in found.items()
    ]
    experiment.show(
        "Conversation table, one core",
        list(_COLUMNS),
        [[cell(one) for cell in _COLUMNS.values()] for one in samples],
        names=0, caption="medians; frozen: cycles/s after gc.freeze()", box=SIMPLE_HEAD,
    )  # fmt: skip
    results = verdicts(samples)
    rows = [(*said, "[green]met[/]" if met else "[red]missed[/]") for *said, met in results]
    experiment.show("Targets", ("what", "target", "measured", "verdict"), rows, names=4)
    experiment.save({"sizes": samples, "targets": results})


if __name__ == "__main__":
    main()
