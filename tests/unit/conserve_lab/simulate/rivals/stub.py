"""Engines of which rivals see no more than numbers."""

from dataclasses import dataclass

from conserve_lab.simulate.rivals import Program


@dataclass
class StubEngine:
    """So many turns, and room for so much."""

    capacity_tokens: int = 10_000
    turns: int = 0


def acting(id: str, tokens: int, since_s: float = 0.0) -> Program:
    """A program whose tools run."""
    return Program(id, tokens=tokens, turns=2, acting_s=since_s)


def reasoning(id: str, tokens: int, turns: int = 2) -> Program:
    """A program of which a turn has come."""
    return Program(id, tokens=tokens, turns=turns, reasoning=True)
