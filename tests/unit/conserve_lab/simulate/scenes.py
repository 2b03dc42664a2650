"""What tests of the simulator share: costs, scripted conversations, and an engine alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from conserve_lab.records import Answer, SharedPrefix, TurnRequest
from conserve_lab.simulate import Costs
from conserve_lab.simulate.engine import EngineTurn, SimulatedEngine
from conserve_lab.workloads import PRESETS, Arrivals, Workload, synthetic

COSTS = Costs(
    step_s=0.008,
    per_sequence_s=0.0005,
    per_kv_token_s=4e-8,
    prefill_s=0.01,
    per_token_s=2.5e-5,
    per_pair_s=1e-9,
    per_cached_token_s=1e-8,
    prefill_share=0.7,
    handoff_s=0.004,
    handoff_per_token_s=5e-6,
    capacity_tokens=300_000,
    batched_tokens=2_048,
    idle_w=30.0,
    prefill_w=300.0,
    decode_w=200.0,
)


def drawn(conversations: int = 60, rate_per_s: float = 2.0, **more: Any) -> Workload:
    return synthetic(
        PRESETS["conserve"],
        conversations=conversations,
        arrivals=Arrivals("poisson", rate_per_s),
        vocabulary=range(1000, 4000),
        **more,
    )


@dataclass
class Scripted:
    """A conversation of given lengths: prompt, of it reused, output, gap before.

    Attributes:
        shared: what all of its prompts begin with, as others' do.
    """

    turns: Sequence[tuple[int, int, int, float]]
    conversation: str = "c"
    shared: tuple[SharedPrefix, ...] = ()
    at: int = 0

    def next(self, answer: Answer | None) -> TurnRequest | None:
        if self.at == len(self.turns):
            return None
        prompt, reused, output, gap_s = self.turns[self.at]
        self.at += 1
        last = self.at == len(self.turns)
        return TurnRequest(
            gap_s, "/v1/completions", dict, prompt, reused, output, last, shared=self.shared
        )


class LoneEngine:
    """A simulated engine and the time; it never holds more than it can.

    Attributes:
        ended: turns, and when each ended.
    """

    def __init__(self, capacity_tokens: int, **more: Any) -> None:
        self.events: list[tuple[float, int]] = []
        self.ended: list[tuple[EngineTurn, float]] = []
        self.now_s = 0.0
        self.engine = SimulatedEngine(
            "e",
            replace(COSTS, capacity_tokens=capacity_tokens),
            lambda at_s, engine, version: self.events.append((at_s, version)),
            lambda work, engine, now_s: self.ended.append((work, now_s)),
            **more,
        )

    def run(self, until_s: float = float("inf")) -> None:
        while self.events and min(self.events)[0] <= until_s:
            self.events.sort()
            self.now_s, version = self.events.pop(0)
            self.engine.wake(self.now_s, version)
            self.check()
        if until_s < float("inf"):
            self.now_s = until_s

    def check(self) -> None:
        active, idle = self.engine.active_tokens, self.engine.idle_tokens
        assert active >= 0
        assert idle >= 0
        assert active + idle <= self.engine.capacity_tokens
