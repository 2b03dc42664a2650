"""ThunderAgent: programs are paused at tools' boundaries where they are more than engines hold."""

from collections.abc import Iterable, Mapping

from benchmarks.simulate.rivals.rival import Engine, Program, Rival

# A waiting program is sent on after so long, wherever there is room or not.
_LONGEST_WAIT_S = 1800.0
# What is kept free for each program on an engine, to decode.
_BUFFER_TOKENS = 100


class ThunderAgent(Rival):
    """ThunderAgent (arXiv 2602.13692), as its public code does it (commit 260e227).

    Every five seconds (delta t), on the sum of the contexts of the programs on each engine, with a
    buffer of 100 tokens a program, against its capacity (lambda_max and lambda_min are 1):

    - *Resume* (equations 4 and 10): programs in the global queue whose turn waits go first, then
      new ones, then those whose tools run, in each group the shortest first, as many as fit all
      engines' room together; of these the longest is placed first, where most room is. For this
      alone acting programs' tokens count 2^-t, t seconds after their turn's end (equation 7).
    - *Pause* (equations 5 and 11): while an engine's programs, undiscounted, are more than it
      holds, its acting programs leave it, the shortest first; and if that is not enough, *all* of
      its reasoning ones are marked, to leave at their turn's end, since what is marked is not
      deducted from what is too much.

    A new program goes to an engine at once if nobody waits and it fits, the one with the fewest
    tokens. Nothing is told to engines: KV of who is paused stays until it falls out of their
    caches. Whoever has waited for half an hour is sent on regardless.

    Simplified: prompts' lengths are exact, where the code estimates them from characters; what a
    turn has put out counts from its end, as with requests that are not streamed. Tool environments
    are not simulated. (Shared prefixes are deducted in the paper; in this version of the code
    nothing updates what is deducted.)

    Args:
        discounts: whether acting programs' tokens are discounted as said, as in the paper's
            experiments; the code has it as an option that is off by default.
    """

    interval_s = 5.0

    def __init__(self, engines: Mapping[str, Engine], discounts: bool = True) -> None:
        super().__init__(engines)
        self._discounts = discounts
        self._on: dict[str, dict[Program, None]] = {id: {} for id in engines}
        # Who is paused, or new and waits, and since when its turn waits, if one does.
        self._queue: dict[Program, float | None] = {}
        self._marked: set[Program] = set()

    def route(self, program: Program, now_s: float) -> str | None:
        """Return where it is active; a new one where it fits, unless others wait."""
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
        """One that was marked leaves its engine."""
        if program in self._marked:
            self._marked.discard(program)
            self._pause(program)

    def ended(self, program: Program) -> None:
        """It leaves no trace."""
        self._marked.discard(program)
        self._queue.pop(program, None)
        for programs in self._on.values():
            programs.pop(program, None)

    def check(self, now_s: float) -> Iterable[tuple[Program, str]]:
        """Resume whom there is room for, then pause where there is too little."""
        went = self._overdue(now_s)
        went += self._resume(now_s)
        for engine_id in self._on:
            self._pause_until_safe(engine_id)
        return went

    def paused(self) -> list[Program]:
        """Return those in the global queue."""
        return list(self._queue)

    def marked(self) -> set[Program]:
        """Return those that leave at their turn's end."""
        return set(self._marked)

    def room(self, engine_id: str, now_s: float | None = None) -> float:
        """Tokens that an engine has left; less than 0 where it is above its capacity.

        Args:
            now_s: if given, acting programs are discounted by how long they act.
        """
        programs = self._on[engine_id]
        used = self._tokens(engine_id, now_s) + _BUFFER_TOKENS * len(programs)
        return self._engines[engine_id].capacity_tokens - used

    def _tokens(self, engine_id: str, now_s: float | None = None) -> float:
        return sum(
            one.tokens
            if one.reasoning or now_s is None
            else one.tokens * 2.0 ** -(now_s - one.acting_s)
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
        rooms = {id: self.room(id, now_s if self._discounts else None) for id in self._on}
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
        """Take a program from the queue to an engine; with its turn, if one waits."""
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
