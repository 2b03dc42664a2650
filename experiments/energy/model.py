"""When each engine of the paper's machine is busy, and with what: simulated, not measured.

One prefiller and three decoders on A40s with the rates of section 5.1, on the engines of
`conserve_lab.simulate`, looked at in small steps of time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from conserve_lab.records import Script, TurnRecord
from conserve_lab.simulate import Cluster, Costs, System

# Section 5.1: "the prefiller sustains roughly 25k input tokens per second, while each decoder
# produces 1k output tokens per second and accommodates approximately 300k tokens of KV cache".
PREFILL_TOKENS_PER_S = 25_000.0
_DECODE_TOKENS_PER_S = 1_000.0
_KV_TOKENS = 300_000
# One sequence reads the weights at each step: 0.6e9 parameters of 2 bytes at 696 GB/s (A40's data
# sheet) take 1.7 ms. The paper does not say how many sequences give 1k tokens/s: assumed.
_ALONE_TOKENS_PER_S = 580.0
_SEQUENCES = 3
_CHUNK_TOKENS = 8_192
# Every turn waits for as long as it takes.
_PATIENCE_S = 1e9


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as long an engine's work takes under its cap; 1: as without one."""

    prefill: float = 1.0
    decode: float = 1.0

    @property
    def costs(self) -> Costs:
        """The costs of an engine of the paper's machine at this speed."""
        alone_s = 1 / _ALONE_TOKENS_PER_S
        per_sequence_s = (_SEQUENCES / _DECODE_TOKENS_PER_S - alone_s) / (_SEQUENCES - 1)
        return Costs(
            step_s=(alone_s - per_sequence_s) * self.decode,
            per_sequence_s=per_sequence_s * self.decode,
            per_kv_token_s=0.0,
            prefill_s=0.0,
            per_token_s=self.prefill / PREFILL_TOKENS_PER_S,
            per_pair_s=0.0,
            per_cached_token_s=0.0,
            prefill_share=1.0,
            handoff_s=0.0,
            handoff_per_token_s=0.0,
            capacity_tokens=_KV_TOKENS,
            batched_tokens=_CHUNK_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """An engine's work in a step of time, in seconds; it was idle for the rest."""

    prefill_s: float
    decode_s: float


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
    """The paper's GPUs under load: ``prefiller-0``, and ``decoder-0`` and so on."""

    def __init__(self, prefiller: Speed, decoder: Speed, decoders: int = 3) -> None:
        system = System(
            "conserve",
            "conversation",
            (prefiller.costs,),
            (decoder.costs,) * decoders,
            queue_timeout_s=_PATIENCE_S,
        )
        self._cluster = Cluster(system, self._ended)
        self._engines = {**self._cluster.prefillers, **self._cluster.decoders}
        self.outcome = ModelledRun()

    def run(
        self, plan: Iterable[tuple[float, Script]], step_s: float = 0.05
    ) -> Iterator[tuple[float, dict[str, Step]]]:
        """Serve a plan; yields, for each step, its end and what each engine did in it."""
        cluster, outcome = self._cluster, self.outcome
        outcome.busy = dict.fromkeys(self._engines, Step(0.0, 0.0))
        steps = 0
        cluster.start(plan)
        while cluster.open:
            steps += 1
            cluster.advance(steps * step_s)
            did = {}
            for name, engine in self._engines.items():
                before, now = outcome.busy[name], Step(*engine.busy_s(steps * step_s))
                outcome.busy[name] = now
                did[name] = Step(now.prefill_s - before.prefill_s, now.decode_s - before.decode_s)
            yield steps * step_s, did
        outcome.duration_s = steps * step_s
        outcome.computed_tokens = self.computed_tokens()

    def computed_tokens(self) -> dict[str, int]:
        """Tokens that each engine has prefilled or decoded so far."""
        return {name: engine.computed_tokens for name, engine in self._engines.items()}

    def _ended(self, turns: list[TurnRecord]) -> None:
        outcome = self.outcome
        for turn in turns:
            assert turn.first_token_s is not None
            outcome.tokens += turn.prompt_tokens + turn.output_tokens
            outcome.turn_s.append(turn.ended_s - turn.sent_s)
            if turn.turn == 1:
                outcome.ttft1_s.append(turn.first_token_s - turn.sent_s)
