"""Programs: conversations whose turns are made by the ends of the turns, and tools, before them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.engine import Engine
from benchmarks.simulate.inside.lane import LaneEngine
from benchmarks.simulate.inside.loop import Loop
from benchmarks.workloads import Arrivals, Shape


@dataclass(frozen=True, slots=True)
class Turn:
    """One of a program's turns.

    Attributes:
        append_tokens: behind all that was before; the first turn's prompt.
        tool_s: of the tool that follows it; 0 after the last one.
    """

    append_tokens: int
    output_tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Program:
    """All turns of one conversation."""

    key: str
    arrives_s: float
    turns: tuple[Turn, ...]


def draw(shape: Shape, programs: int, arrivals: Arrivals, seed: int) -> list[Program]:
    """Programs of a shape, the same for the same seed."""
    rng = np.random.default_rng(seed)
    drawn = []
    for number, arrives_s in zip(range(programs), arrivals.times_s(), strict=False):
        turns = int(shape.turns.draw(rng, 1)[0])
        appends = shape.append_tokens.draw(rng, turns)
        appends[0] = shape.first_prompt_tokens.draw(rng, 1)[0]
        outputs = shape.output_tokens.draw(rng, turns)
        tools_s = shape.tool_latency.draw(rng, turns)
        tools_s[-1] = 0.0
        made = [
            Turn(int(append), int(output), float(tool_s))
            for append, output, tool_s in zip(appends, outputs, tools_s, strict=True)
        ]
        drawn.append(Program(f"p{number}", arrives_s, tuple(made)))
    return drawn


class Tools:
    """The CPUs on which tools run, one each; a tool that finds none free is queued.

    Attributes:
        at_work: tools that run or wait.
    """

    def __init__(self, loop: Loop, cores: int) -> None:
        self._loop = loop
        self._cores = cores
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self.at_work = 0

    @property
    def pressure(self) -> float:
        """How much of the cores is asked for, at most 1."""
        return min(1.0, self.at_work / self._cores)

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        self.at_work += 1
        if self.at_work > self._cores:
            self._waiting.append((seconds, then))
        else:
            self._loop.at(self._loop.now_s + seconds, self._ends, then)

    def _ends(self, then: Callable[[], None]) -> None:
        self.at_work -= 1
        if self._waiting:
            seconds, next_then = self._waiting.pop(0)
            self._loop.at(self._loop.now_s + seconds, self._ends, next_then)
        then()


@dataclass(slots=True)
class Live:
    """A program that has come.

    Attributes:
        turn: the number of its next turn, from 0.
        context_tokens: its history, the answer to a running turn not included.
        ended_s: when its last turn ended; negative before.
    """

    program: Program
    turn: int = 0
    context_tokens: int = 0
    ended_s: float = -1.0


class Sessions(ABC):
    """Programs that go from one engine to their tools and back.

    Args:
        cores: that tools run on.

    Attributes:
        engine: the engine, which calls `turn_ends`.
        calls: all calls, and whether each is its program's first one.
    """

    engine: Engine | LaneEngine

    def __init__(self, cores: int) -> None:
        self.loop = Loop()
        self.tools = Tools(self.loop, cores)
        self.live: dict[str, Live] = {}
        self.calls: list[tuple[Call, bool]] = []

    def turn(self, key: str) -> None:
        """A program's next turn comes."""
        one = self.live[key]
        turn = one.program.turns[one.turn]
        one.context_tokens += turn.append_tokens
        # No system is told that a call is its program's last one.
        call = Call(key, one.context_tokens, turn.output_tokens, one.program.arrives_s)
        self.calls.append((call, one.turn == 0))
        self.engine.submit(call)

    def turn_ends(self, call: Call) -> None:
        """A turn ends; its tool runs, and then the next turn comes."""
        one = self.live[call.key]
        turn = one.program.turns[one.turn]
        one.context_tokens += turn.output_tokens
        one.turn += 1
        if one.turn < len(one.program.turns):
            self.tools.run(turn.tool_s, lambda: self.turn(call.key))
            return
        one.ended_s = self.loop.now_s
        self.ended(call.key)

    @abstractmethod
    def ended(self, key: str) -> None:
        """A program has ended."""
