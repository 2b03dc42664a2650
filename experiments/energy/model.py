"""When each engine of the paper's machine is busy, and with what: a model, not a measurement.

One prefiller and three decoders on A40s, with the rates that the paper states (§5.1). Time goes
in small steps; within one, an engine prefills first, in order, then all its turns decode side by
side. Conversations are placed by ConServe's own table and policy.
"""

import heapq
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.records import Script, TurnRequest
from conserve.admission import Admission, Admitted, Ticket
from conserve.conversations import ConversationTable
from conserve.history import TurnKey, TurnStats
from conserve.placement import make_policy

# Section 5.1: "the prefiller sustains roughly 25k input tokens per second, while each decoder
# produces 1k output tokens per second and accommodates approximately 300k tokens of KV cache".
PREFILL_TOKENS_PER_S = 25_000.0
DECODE_TOKENS_PER_S = 1_000.0
KV_TOKENS = 300_000
# One sequence reads the weights at each step: 0.6e9 parameters of 2 bytes at 696 GB/s (A40's data
# sheet) take 1.7 ms.
ALONE_TOKENS_PER_S = 580.0


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as long an engine's work takes under its cap; 1: as without one."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """Tells what an engine did in one step, in seconds; idle for the rest."""

    prefill_s: float
    decode_s: float


@dataclass(slots=True)
class _Turn:
    script: Script
    request: TurnRequest
    sent_s: float
    key: TurnKey | None = None
    reused_tokens: int = 0
    left_tokens: float = 0.0
    first_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens or 0

    @property
    def output_tokens(self) -> int:
        return self.request.output_tokens or 1


@dataclass(slots=True)
class _Engine:
    """An engine's queue of prefills (seconds of work), and the turns that decode."""

    speed: Speed
    prefills: deque[tuple[_Turn, float]] = field(default_factory=deque)
    decoding: list[_Turn] = field(default_factory=list)
    computed_tokens: int = 0
    busy: Step = Step(0.0, 0.0)

    def prefill(self, turn: _Turn, tokens: int) -> None:
        self.computed_tokens += tokens
        self.prefills.append((turn, tokens / PREFILL_TOKENS_PER_S * self.speed.prefill))

    def step(self, step_s: float) -> tuple[Step, list[_Turn], list[_Turn]]:
        """Run a step; returns what the engine did, the turns prefilled, and those answered."""
        left_s = step_s
        prefilled = []
        while self.prefills and left_s > 0:
            turn, work_s = self.prefills.popleft()
            if work_s > left_s:
                self.prefills.appendleft((turn, work_s - left_s))
                left_s = 0.0
            else:
                left_s -= work_s
                prefilled.append(turn)
        prefill_s = step_s - left_s
        answered: list[_Turn] = []
        running = len(self.decoding)
        if not running or not left_s:
            return Step(prefill_s, 0.0), prefilled, answered
        rate = min(ALONE_TOKENS_PER_S, DECODE_TOKENS_PER_S / running) / self.speed.decode
        longest_s = max(turn.left_tokens for turn in self.decoding) / rate
        for turn in self.decoding:
            turn.left_tokens -= rate * left_s
        answered = [turn for turn in self.decoding if turn.left_tokens <= 0]
        self.decoding = [turn for turn in self.decoding if turn.left_tokens > 0]
        return Step(prefill_s, min(left_s, longest_s)), prefilled, answered


@dataclass(slots=True)
class ModelledRun:
    """A run of the model.

    Attributes:
        duration_s: time from the start to the last answer.
        busy: seconds of prefill and of decode, by engine.
        computed_tokens: tokens prefilled or decoded, by engine.
        tokens: length of all prompts, each whole, and of all outputs.
        ttft1_s: first turns' times to first token.
        turn_s: all turns' latencies.
    """

    duration_s: float = 0.0
    busy: dict[str, Step] = field(default_factory=dict)
    computed_tokens: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    ttft1_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)


class Machine:
    """The paper's four GPUs at work.

    Args:
        prefillers, decoders: each engine's speed, by its name; there is at least one prefiller.
    """

    def __init__(self, prefillers: dict[str, Speed], decoders: dict[str, Speed]) -> None:
        self._prefillers = {name: _Engine(speed) for name, speed in prefillers.items()}
        self._decoders = {name: _Engine(speed) for name, speed in decoders.items()}
        self._table = ConversationTable(make_policy("conversation"), idle_timeout_s=1e9)
        for name in prefillers:
            self._table.add_prefiller(name)
        for name in decoders:
            self._table.add_decoder(name, KV_TOKENS)
        self._due: list[tuple[float, int, Script, TurnRequest]] = []
        # Everybody waits for as long as it takes.
        self._admission = Admission(self._table, limit=sys.maxsize, timeout_s=math.inf)
        self._waiting: dict[str, _Turn] = {}
        self._number = 0
        self._open = 0
        self.outcome = ModelledRun()

    def run(
        self, plan: Iterable[tuple[float, Script]], step_s: float = 0.05
    ) -> Iterator[tuple[float, dict[str, Step]]]:
        """Serve a plan; yields, for each step, its end and what each engine did in it."""
        arrivals = iter(plan)
        coming = next(arrivals, None)
        now_s = 0.0
        while coming is not None or self._open:
            while coming is not None and coming[0] <= now_s:
                self._open += 1
                self._ask(coming[1], coming[0])
                coming = next(arrivals, None)
            self._send_due(now_s)
            now_s += step_s
            steps = {}
            for name, engine in self._prefillers.items():
                steps[name], done, _ = self._stepped(engine, step_s)
                for turn in done:
                    self._hand_off(turn)
            for name, engine in self._decoders.items():
                steps[name], done, answered = self._stepped(engine, step_s)
                for turn in done:
                    self._start_decoding(engine, turn, now_s)
                for turn in answered:
                    self._answered(name, engine, turn, now_s)
            yield now_s, steps
        engines = self._prefillers | self._decoders
        self.outcome.duration_s = now_s
        self.outcome.busy = {name: engine.busy for name, engine in engines.items()}
        self.outcome.computed_tokens = {
            name: engine.computed_tokens for name, engine in engines.items()
        }

    def computed_tokens(self) -> dict[str, int]:
        """Tokens that each engine has taken on so far, to prefill or to decode."""
        engines = self._prefillers | self._decoders
        return {name: engine.computed_tokens for name, engine in engines.items()}

    def _stepped(self, engine: _Engine, step_s: float) -> tuple[Step, list[_Turn], list[_Turn]]:
        step, done, answered = engine.step(step_s)
        engine.busy = Step(
            engine.busy.prefill_s + step.prefill_s, engine.busy.decode_s + step.decode_s
        )
        return step, done, answered

    def _ask(self, script: Script, at_s: float) -> None:
        request = script.next(None)
        if request is None:
            self._open -= 1
            self._table.release(script.conversation)
            return
        self._number += 1
        heapq.heappush(self._due, (at_s + request.gap_s, self._number, script, request))

    def _send_due(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            at_s, _, script, request = heapq.heappop(self._due)
            turn = _Turn(script, request, at_s, left_tokens=request.output_tokens or 1)
            if script.conversation in self._table:
                self._later_turn(turn, now_s)
                continue
            answer = self._admission.enter(script.conversation, turn.prompt_tokens, now_s)
            if isinstance(answer, Ticket):
                self._waiting[script.conversation] = turn
            else:
                self._start(turn, answer)
        for admitted in self._admission.admit(now_s):
            self._start(self._waiting.pop(admitted.history.id), admitted)

    def _start(self, turn: _Turn, admitted: Admitted) -> None:
        turn.key = admitted.turn
        prefiller_id = admitted.placement.prefiller_id
        assert prefiller_id is not None
        self._prefillers[prefiller_id].prefill(turn, turn.prompt_tokens)

    def _later_turn(self, turn: _Turn, now_s: float) -> None:
        conversation = self._table.begin(turn.script.conversation, now_s)
        assert conversation is not None
        assert conversation.decoder_id is not None
        turn.reused_tokens = min(conversation.held_tokens, turn.prompt_tokens)
        turn.key = conversation.newest_turn
        appended = turn.prompt_tokens - turn.reused_tokens
        self._decoders[conversation.decoder_id].prefill(turn, appended)

    def _hand_off(self, turn: _Turn) -> None:
        conversation = self._table.get(turn.script.conversation)
        assert conversation is not None
        assert conversation.decoder_id is not None
        assert turn.key is not None
        self._table.prefilled(turn.key)
        turn.reused_tokens = turn.prompt_tokens
        self._decoders[conversation.decoder_id].prefill(turn, 0)

    def _start_decoding(self, engine: _Engine, turn: _Turn, now_s: float) -> None:
        if turn.key is not None and turn.first_s is None:
            turn.first_s = now_s
        engine.computed_tokens += turn.output_tokens
        engine.decoding.append(turn)

    def _answered(self, name: str, engine: _Engine, turn: _Turn, now_s: float) -> None:
        outcome = self.outcome
        outcome.tokens += turn.prompt_tokens + turn.output_tokens
        outcome.turn_s.append(now_s - turn.sent_s)
        conversation = self._table.get(turn.script.conversation)
        assert conversation is not None
        if conversation.turns == 0 and turn.first_s is not None:
            outcome.ttft1_s.append(turn.first_s - turn.sent_s)
        stats = TurnStats(turn.prompt_tokens, turn.output_tokens, turn.reused_tokens, 0)
        assert turn.key is not None
        self._table.advance(turn.key, name, stats, (), now_s)
        self._ask(turn.script, now_s)
