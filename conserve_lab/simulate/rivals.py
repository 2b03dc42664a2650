"""Other systems, by the rules that their papers and code state, on the same simulated engines.

All of them use engines that prefill and decode. `Rival` says what a system decides,
`conserve_lab.simulate.fleet` does it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

RivalName = Literal["vllm", "affinity", "sticky", "ttl", "attained", "thunderagent"]
"""``vllm``: least loaded, first come first served; ``affinity``: the same, but conversations stay
where they began; ``sticky``: that, unless that engine has far more turns than another; ``ttl``:
Continuum; ``attained``: Autellix; ``thunderagent``: ThunderAgent."""

# Autellix: bounds of the queues, in seconds of service: each four times the one before.
_FIRST_S, _FACTOR, _QUEUES = 1.0, 4.0, 8
# Sticky: SGLang's router has 64 turns by default; fewer are better here.
_AHEAD, _TIMES = 1, 1.5
# ThunderAgent: a waiting program is sent on after so long, wherever there is room or not.
_LONGEST_WAIT_S = 1800.0
# ThunderAgent: what is kept free for each program on an engine, to decode.
_BUFFER_TOKENS = 100


@dataclass(eq=False, slots=True)
class Program:
    """A conversation, as the papers call those of agents.

    Attributes:
        tokens: its context: a running turn's prompt, or after its end with what was put out.
        turns: how many turns came, one under way included.
        reasoning: whether a turn of it runs or waits; else its tools do, since ``acting_s``.
        engine_id: where its last turn was sent; None before the first.
        attained_s: how long engines have worked on its turns that are over.
    """

    id: str
    arrived_s: float = 0.0
    tokens: int = 0
    turns: int = 0
    reasoning: bool = False
    acting_s: float = 0.0
    engine_id: str | None = None
    attained_s: float = 0.0


class Engine(Protocol):
    @property
    def turns(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...


class Rival(ABC):
    """A system's rules. Nothing is refused: a turn that does not go to an engine at once waits.

    `check` has to be called every ``interval_s``; None: never.
    """

    interval_s: float | None = None

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    @abstractmethod
    def route(self, program: Program, now_s: float) -> str | None:
        """Return where a turn goes that has come; None: it waits until `check` names it."""

    def answered(self, program: Program, now_s: float) -> None:  # noqa: B027 # most need nothing
        ...

    def ended(self, program: Program) -> None:  # noqa: B027
        ...

    def check(self, now_s: float) -> Iterable[tuple[Program, str]]:
        """Return programs whose waiting turns go to an engine now, and where."""
        return ()

    def priority(self, program: Program) -> float:
        """Return the priority of a turn that goes to its engine: the lowest goes first."""
        return 0.0

    def keep_s(self, program: Program) -> float:
        """Return for how long the KV of a turn that has ended is not dropped."""
        return 0.0

    def least_loaded(self) -> str:
        return min(self._engines, key=lambda id: self._engines[id].turns)


class LeastLoaded(Rival):
    """Each turn goes to the engine with the fewest; engines serve first come, first served.

    vLLM's own load balancing between data-parallel engines does this. A turn that comes to another
    engine than the one before finds nothing cached there.
    """

    def route(self, program: Program, now_s: float) -> str | None:
        return self.least_loaded()


class Affinity(Rival):
    """A program's first turn goes to the engine with the fewest turns, the others follow it.

    So do session-aware routers, as vLLM's production stack's and Ray Serve LLM's (ThunderAgent,
    section 3.2, describes them as the "KV-aware" baseline).
    """

    def route(self, program: Program, now_s: float) -> str | None:
        return program.engine_id or self.least_loaded()


class Sticky(Affinity):
    """Affinity, up to a difference in load: cache-aware routers, as SGLang's and vLLM's.

    Taken: where the busiest engine has more than ``_AHEAD`` turns more than the idlest, and more
    than ``_TIMES`` times as many, a turn goes to the idlest, and its program stays there. The
    routers look at all engines; here the program's own counts as the busiest, as otherwise a turn
    would leave an idle engine.

    Simplified: they find a prompt's engine by a tree of prompts, here it is known.
    """

    def route(self, program: Program, now_s: float) -> str | None:
        least = self.least_loaded()
        if program.engine_id is None:
            return least
        here, there = self._engines[program.engine_id].turns, self._engines[least].turns
        return least if here - there > _AHEAD and here > _TIMES * there else program.engine_id


class Attained(Affinity):
    """Autellix (Luo et al., arXiv 2502.13965): program-level attained service (PLAS).

    Taken: a turn's priority is the time that engines have worked on its program's earlier turns, in
    discrete queues with exponentially growing bounds, first come first served in each.

    Simplified: a turn keeps its queue until it ends, and one that runs is preempted only where KV
    runs out; the paper's engine also demotes running turns and swaps their KV to host memory.
    Programs stay on their first engine; the paper sends short turns to the least loaded one.
    """

    def priority(self, program: Program) -> float:
        bound_s, queue = _FIRST_S, 0
        while program.attained_s >= bound_s and queue < _QUEUES - 1:
            bound_s *= _FACTOR
            queue += 1
        return float(queue)


class Ttl(Affinity):
    """Continuum (Li et al., arXiv 2511.02230), with a fixed time to live as in its released code.

    Taken: after a turn its program's KV stays for ``ttl_s``. It is dropped before only if running
    turns need a block and there is none else, or if nothing runs and nothing that waits fits.
    Turns wait in the order in which their programs came.

    Simplified: the paper sets each tool's time to live from the times seen of that tool. The
    released code has 2 s for all, and keeps no KV for tools that take longer on average. Tools have
    no names here, so KV is kept at every turn's end. Several engines are used by affinity.
    """

    def __init__(self, engines: Mapping[str, Engine], ttl_s: float) -> None:
        super().__init__(engines)
        self._ttl_s = ttl_s

    def priority(self, program: Program) -> float:
        return program.arrived_s

    def keep_s(self, program: Program) -> float:
        return self._ttl_s


class ThunderAgent(Rival):
    """ThunderAgent (arXiv 2602.13692), as its public code does it (commit 260e227).

    Every ``interval_s`` (delta t), on the sum of the contexts of the programs on each engine, with
    a buffer of 100 tokens a program, against its capacity (lambda_max and lambda_min are 1):

    - *Resume* (equations 4 and 10): programs in the global queue whose turn waits go first, then
      new ones, then those whose tools run, the shortest first, as many as fit all engines' room
      together; of these the longest is placed first, where most room is. For this alone acting
      programs' tokens count f(t) = x^-t, t seconds after their turn's end (equation 7).
    - *Pause* (equations 5 and 11): while an engine's programs, undiscounted, are more than it
      holds, its acting programs leave it, the shortest first. If that is not enough, *all* of its
      reasoning ones are marked, to leave at their turn's end.

    A new program goes at once to the engine with the fewest tokens if no other waits and it fits.
    Engines are told nothing: a paused program's KV stays until it falls out of their caches. A turn
    that has waited for half an hour is sent on regardless.

    Simplified: prompts' lengths are exact, where the code estimates them from characters; a turn's
    output counts from its end, as with requests that are not streamed. Tool environments are not
    simulated. Shared prefixes are not deducted; this version of the code never does.

    Args:
        decay: x of f(t), 2 in the paper's experiments. 1 counts acting programs in full, as the
            code does by default.
    """

    def __init__(
        self, engines: Mapping[str, Engine], *, interval_s: float = 5.0, decay: float = 2.0
    ) -> None:
        super().__init__(engines)
        self.interval_s = interval_s
        self._decay = decay
        self._on: dict[str, dict[Program, None]] = {id: {} for id in engines}
        # Who is paused, or new and waits, and since when its turn waits, if one does.
        self._queue: dict[Program, float | None] = {}
        self._marked: set[Program] = set()

    def route(self, program: Program, now_s: float) -> str | None:
        if program in self._queue:
            self._queue[program] = now_s
            return None
        if program.engine_id is None:
            needed = program.tokens + _BUFFER_TOKENS
            fitting = [id for id in self._on if self.room(id) >= needed]
            if self._queue or not fitting:
                self._queue[program] = now_s
                return None
            engine_id = min(fitting, key=self._tokens)
            self._on[engine_id][program] = None
            return engine_id
        return program.engine_id

    def answered(self, program: Program, now_s: float) -> None:
        if program in self._marked:
            self._marked.discard(program)
            self._pause(program)

    def ended(self, program: Program) -> None:
        self._marked.discard(program)
        self._queue.pop(program, None)
        for programs in self._on.values():
            programs.pop(program, None)

    def check(self, now_s: float) -> Iterable[tuple[Program, str]]:
        """Resume programs that fit, then pause where there is too little room."""
        went = self._overdue(now_s)
        went += self._resume(now_s)
        for engine_id in self._on:
            self._pause_until_safe(engine_id)
        return went

    def paused(self) -> list[Program]:
        return list(self._queue)

    def marked(self) -> set[Program]:
        return set(self._marked)

    def room(self, engine_id: str, now_s: float | None = None) -> float:
        """Tokens that an engine has left; with ``now_s``, acting programs are discounted."""
        programs = self._on[engine_id]
        used = self._tokens(engine_id, now_s) + _BUFFER_TOKENS * len(programs)
        return self._engines[engine_id].capacity_tokens - used

    def _tokens(self, engine_id: str, now_s: float | None = None) -> float:
        return sum(
            one.tokens
            if one.reasoning or now_s is None
            else one.tokens * self._decay ** -(now_s - one.acting_s)
            for one in self._on[engine_id]
        )

    def _overdue(self, now_s: float) -> list[tuple[Program, str]]:
        late = [
            one
            for one, since_s in self._queue.items()
            if since_s is not None and now_s - since_s >= _LONGEST_WAIT_S
        ]
        return [
            sent
            for one in late
            for sent in self._activate(one, one.engine_id or min(self._on, key=self._count))
        ]

    def _count(self, engine_id: str) -> int:
        return len(self._on[engine_id])

    def _resume(self, now_s: float) -> list[tuple[Program, str]]:
        rooms = {id: self.room(id, now_s) for id in self._on}
        rooms = {id: room for id, room in rooms.items() if room > _BUFFER_TOKENS}
        total = sum(rooms.values())
        chosen: list[Program] = []
        for one in sorted(self._queue, key=_restored_first):
            if one.tokens + _BUFFER_TOKENS <= total:
                chosen.append(one)
                total -= one.tokens + _BUFFER_TOKENS
        went = []
        for one in sorted(chosen, key=lambda one: -one.tokens):
            engine_id = max(rooms, key=rooms.__getitem__, default=None)
            if engine_id is None:
                break
            if one.tokens + _BUFFER_TOKENS > rooms[engine_id]:
                continue
            went += self._activate(one, engine_id)
            rooms[engine_id] -= one.tokens + _BUFFER_TOKENS
            if rooms[engine_id] <= _BUFFER_TOKENS:
                del rooms[engine_id]
        return went

    def _activate(self, program: Program, engine_id: str) -> list[tuple[Program, str]]:
        waits = self._queue.pop(program) is not None
        self._on[engine_id][program] = None
        program.engine_id = engine_id
        return [(program, engine_id)] if waits else []

    def _pause(self, program: Program) -> None:
        assert program.engine_id is not None
        del self._on[program.engine_id][program]
        self._queue[program] = None

    def _pause_until_safe(self, engine_id: str) -> None:
        programs = self._on[engine_id]
        for one in sorted(programs, key=lambda one: one.tokens):
            if self.room(engine_id) >= 0:
                return
            if not one.reasoning:
                self._pause(one)
        if self.room(engine_id) < 0:
            self._marked.update(programs)


def _restored_first(program: Program) -> tuple[int, int]:
    if program.turns == 1:
        return 1, program.tokens
    return (0 if program.reasoning else 2), program.tokens


def make_rival(
    name: RivalName,
    engines: Mapping[str, Engine],
    *,
    ttl_s: float = 2.0,
    interval_s: float = 5.0,
    decay: float = 2.0,
) -> Rival:
    match name:
        case "vllm":
            return LeastLoaded(engines)
        case "affinity":
            return Affinity(engines)
        case "sticky":
            return Sticky(engines)
        case "ttl":
            return Ttl(engines, ttl_s)
        case "attained":
            return Attained(engines)
        case "thunderagent":
            return ThunderAgent(engines, interval_s=interval_s, decay=decay)
