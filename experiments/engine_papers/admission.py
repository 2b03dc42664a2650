"""MARS's control plane: which programs are at work (section 4.2), by `conserve.admission`."""

from collections.abc import Callable, Iterator

from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.scheduler import Scheduler
from conserve.admission import Levels, LineOrder, Pressure, Ticket, WaitingLine, Window

# Those in front that are looked at for one who fits, as in `conserve.admission.admission`.
_TRIED = 8
_LOOK_S = 1.0
# Nobody gives up here.
_PATIENCE_S = 1e9


class SmallestFirst:
    """MARS's packing of the line (algorithm 1, PackQueue): the shortest prompt first, while CPUs
    are overloaded the longest. Who does not fit is overtaken. Nothing keeps long ones from
    starving.

    Args:
        cpu_overloaded: whether CPUs are, now.
    """

    def __init__(self, cpu_overloaded: Callable[[], bool]) -> None:
        self._cpu_overloaded = cpu_overloaded
        self._tickets: dict[str, Ticket] = {}

    def join(self, ticket: Ticket) -> None:
        """Somebody begins to wait."""
        self._tickets[ticket.history_id] = ticket

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Somebody waits no longer."""
        del self._tickets[ticket.history_id]

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield those who wait, who goes first first."""
        reverse = self._cpu_overloaded()
        ordered = sorted(self._tickets.values(), key=lambda one: one.prompt_tokens, reverse=reverse)
        return iter(ordered)

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        """Nobody holds anybody up."""
        return False


class ControlPlane:
    """Lets programs in while there is room for their prompts, and by `Window`.

    Room is what the table counts: the histories of all that are in, as long as they are by now,
    against the engine's KV. Who is in stays in.

    Args:
        scheduler: of the engine, whose KV and recomputed tokens are looked at.
        cpu_pressure: of the machine that tools run on.
        begin: called with the key of a program that is let in.
        packs: whether the line is MARS's, by size; else `Levels`, as ConServe's.

    Attributes:
        longest_wait_s: in the line.
    """

    def __init__(
        self,
        loop: Loop,
        scheduler: Scheduler,
        cpu_pressure: Callable[[], float],
        begin: Callable[[str], None],
        *,
        packs: bool = False,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._cpu_pressure = cpu_pressure
        self._begin = begin
        self.window = Window()
        order: LineOrder = SmallestFirst(self._cpu_overloaded) if packs else Levels()
        self.line = WaitingLine(1_000_000, _PATIENCE_S, order)
        self._held_tokens: dict[str, int] = {}
        self._looks = False
        self._counted = (0, 0)
        self.longest_wait_s = 0.0

    def enter(self, key: str, prompt_tokens: int) -> None:
        """A program comes."""
        self.line.join(key, prompt_tokens, self._loop.now_s)
        self._admit()

    def grown(self, key: str, tokens: int) -> None:
        """A program's history is so long by now."""
        self._held_tokens[key] = tokens

    def left(self, key: str) -> None:
        """A program has ended."""
        del self._held_tokens[key]
        self._admit()

    def _admit(self) -> None:
        while (ticket := self._fitting()) is not None:
            self.line.leave(ticket.history_id, went=True)
            self._held_tokens[ticket.history_id] = ticket.prompt_tokens
            self.longest_wait_s = max(self.longest_wait_s, self._loop.now_s - ticket.joined_s)
            self._begin(ticket.history_id)
        if (self.line or self._held_tokens) and not self._looks:
            self._looks = True
            self._loop.at(self._loop.now_s + _LOOK_S, self._look)

    def _fitting(self) -> Ticket | None:
        now_s, blocks = self._loop.now_s, self._scheduler.blocks
        if len(self._held_tokens) >= self.window.limit:
            return None
        room = blocks.total * blocks.block_tokens - sum(self._held_tokens.values())
        for tried, ticket in enumerate(self.line.tickets(now_s)):
            # Who is alone goes, whatever its prompt.
            if ticket.prompt_tokens <= room or not self._held_tokens:
                return ticket
            if tried + 1 == _TRIED or self.line.holds_up(ticket, now_s):
                break
        return None

    def _look(self) -> None:
        self._looks = False
        if self.window.is_due(self._loop.now_s):
            scheduler, before = self._scheduler, self._counted
            self._counted = scheduler.expected_tokens, scheduler.recomputed_tokens
            expected = max(1, self._counted[0] - before[0])
            pressure = Pressure((self._counted[1] - before[1]) / expected, self._cpu_pressure())
            self.window.observe(self._loop.now_s, len(self._held_tokens), pressure)
        self._admit()

    def _cpu_overloaded(self) -> bool:
        return self._cpu_pressure() >= 0.9
