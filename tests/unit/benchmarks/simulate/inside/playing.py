"""Random conversations on a small engine, whose blocks are counted after each step."""

import random
from dataclasses import dataclass, field

from benchmarks.simulate.inside.blocks import Blocks
from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.conversations import (
    ConversationScheduler,
    Parts,
    attained_service,
    time_to_live,
)
from benchmarks.simulate.inside.engine import Engine
from benchmarks.simulate.inside.lane import LaneEngine
from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.scheduler import Scheduler
from benchmarks.simulate.inside.sm_share import FedBackShare, FixedShare

PARTS: dict[str, Parts | None] = {
    "vllm": None,
    "all": Parts(),
    "no order": Parts(order=False),
    "no chunks": Parts(chunks=False),
    "no retention": Parts(retention=False),
    "no parts": Parts(in_parts=False),
    "time to live": time_to_live(2.0),
    "attained service": attained_service(),
}


class Flat:
    """A step takes 10 ms, and 1 ms more for each token of prefill; a smaller share of the GPU makes
    it so much longer."""

    per_kv_token_s = 0.0

    def step_s(self, decodes, kv_tokens=0, chunks=(), compute=1.0, bandwidth=1.0):
        return (0.010 + 0.001 * sum(tokens for tokens, _ in chunks)) / compute


def count_blocks(blocks: Blocks) -> None:
    """Every block is in one state."""
    taken = sum(blocks.held.values()) + sum(blocks.kept.values())
    assert taken + blocks.free == blocks.total
    assert 0 <= sum(blocks.cached.values()) <= blocks.free
    assert min([1, *blocks.held.values(), *blocks.kept.values(), *blocks.cached.values()]) > 0


def scheduler_of(
    parts: Parts | None, blocks: int, step_tokens: int = 64, most_calls: int = 256
) -> Scheduler:
    """One with blocks of four tokens, that counts its blocks whenever a step is over."""
    made: Scheduler
    if parts is None:
        made = Scheduler(Blocks(blocks, 4), step_tokens, most_calls)
    else:
        made = ConversationScheduler(Blocks(blocks, 4), step_tokens, most_calls, parts)
    done = made.done

    def counted(*arguments):
        ended = done(*arguments)
        count_blocks(made.blocks)
        return ended

    made.done = counted
    return made


@dataclass
class Played:
    """Conversations of random turns.

    Attributes:
        turns: of each, what is appended, put out, and waited for afterwards.
        tells_ends: whether the scheduler is told that a conversation has ended.
        calls: as they came.
        ends_s: when each call ended.
    """

    scheduler: Scheduler
    turns: dict[str, list[tuple[int, int, float]]]
    lane: FixedShare | FedBackShare | None = None
    tells_ends: bool = True
    loop: Loop = field(default_factory=Loop)
    calls: list[Call] = field(default_factory=list)
    ends_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = (self.loop, self.scheduler, Flat(), self._ended)
        self.engine = Engine(*made) if self.lane is None else LaneEngine(*made, self.lane)
        self._at = dict.fromkeys(self.turns, (0, 0))

    def begin(self, key: str, at_s: float = 0.0) -> None:
        self.loop.at(at_s, self._next, key)

    def run(self) -> "Played":
        self.loop.run()
        return self

    def call(self, key: str, number: int = 0) -> Call:
        return [one for one in self.calls if one.key == key][number]

    def _next(self, key: str) -> None:
        number, context = self._at[key]
        append, output, _ = self.turns[key][number]
        context += append
        self._at[key] = number, context + output
        call = Call(key, context, output, last=number + 1 == len(self.turns[key]))
        self.calls.append(call)
        self.engine.submit(call)

    def _ended(self, call: Call) -> None:
        number, context = self._at[call.key]
        self.ends_s[call.key, number] = self.loop.now_s
        if number + 1 < len(self.turns[call.key]):
            self._at[call.key] = number + 1, context
            self.loop.at(self.loop.now_s + self.turns[call.key][number][2], self._next, call.key)
        elif self.tells_ends:
            self.scheduler.forget(call.key)


def random_turns(seed: int, conversations: int = 25) -> dict[str, list[tuple[int, int, float]]]:
    chance = random.Random(seed)
    return {
        f"c{number}": [
            (
                chance.choice((3, 20, 90 if turn else 150)),
                chance.randrange(1, 25),
                chance.choice((0.0, 0.3, 4.0)),
            )
            for turn in range(chance.randrange(1, 4))
        ]
        for number in range(conversations)
    }
