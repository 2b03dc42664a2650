"""The seat of a system that is compared: what it decides, and what it sees."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(eq=False, slots=True)
class Program:
    """A conversation, as the papers call those of agents.

    Attributes:
        arrived_s: when its first turn came.
        tokens: its context: a running turn's prompt, or after its end with what was put out.
        turns: how many turns came, one under way included.
        reasoning: whether a turn of it runs or waits; else its tools do.
        acting_s: since when its tools run; of no meaning while it reasons.
        engine_id: where its last turn was sent; None before the first.
        attained_s: for how long engines have worked on its turns that are over.
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
    """Tells what can be seen of an engine."""

    @property
    def turns(self) -> int:
        """How many turns wait or run there."""

    @property
    def capacity_tokens(self) -> int:
        """The size of its KV space."""


class Rival(ABC):
    """A system's rules. Nothing is refused: what does not go to an engine at once waits.

    Args:
        engines: by name.

    Attributes:
        interval_s: how often `check` is to be called; None: never.
    """

    interval_s: float | None = None

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    @abstractmethod
    def route(self, program: Program, now_s: float) -> str | None:
        """Return where a turn goes that has come; None: it waits until `check` names it."""

    def answered(self, program: Program, now_s: float) -> None:  # noqa: B027 # most need nothing
        """A turn has ended."""

    def ended(self, program: Program) -> None:  # noqa: B027
        """A program has ended."""

    def check(self, now_s: float) -> Iterable[tuple[Program, str]]:
        """Programs whose waiting turns go to an engine now, and where."""
        return ()

    def priority(self, program: Program) -> float:
        """Return the priority of a turn that goes to its engine: the lowest goes first."""
        return 0.0

    def keep_s(self, program: Program) -> float:
        """For how long the KV of a turn that has ended is not to be dropped."""
        return 0.0

    def least_loaded(self) -> str:
        """The engine with the fewest turns, waiting and running; the first of equal ones."""
        return min(self._engines, key=lambda id: self._engines[id].turns)
