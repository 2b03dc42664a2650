"""In which order systems take turns, so that no one of them always comes first."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["rounds", "starts"]


@dataclass(frozen=True, slots=True)
class Alternation:
    """How systems took turns, for their reports.

    Attributes:
        unit: ``rounds`` of systems that are up at the same time, or ``starts``: one system at a
            time is up, and all are started several times over.
        seed: what the order was drawn from.
        order: the systems of each round, or of each time that all were started, in their order.
    """

    unit: Unit
    seed: int
    order: list[list[str]]

    @property
    def count(self) -> int:
        """How many rounds or starts of each system there were."""
        return len(self.order)

    def describe(self) -> dict[str, object]:
        """The same for a report's ``environment``."""
        return {"unit": self.unit, "count": self.count, "seed": self.seed, "order": self.order}


def orders(systems: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """Orders drawn at random, in which every system is as often first, second and so on.

    Of as many orders as there are systems, each system has each place once (a Latin square whose
    rows, columns and names are drawn); so of any number, no two systems are in a place so often
    that it differs by more than one.

    Args:
        systems: their names, all different.
        count: how many orders.
        seed: equal seeds give equal orders; a larger count continues a smaller one's.

    >>> orders(["a", "b"], 4, seed=1)
    [['a', 'b'], ['b', 'a'], ['a', 'b'], ['b', 'a']]
    """
    draw = random.Random(seed)
    size = len(systems)
    found: list[list[str]] = []
    while len(found) < count and size:
        names = draw.sample(list(systems), size)
        rows, columns = draw.sample(range(size), size), draw.sample(range(size), size)
        found += [[names[(row + column) % size] for column in columns] for row in rows]
    return found[:count]


def told(alternation: object) -> str | None:
    """One sentence of what `Alternation.describe` gave; None: the systems did not take turns.

    >>> told({"unit": "rounds", "count": 2, "seed": 1, "order": [["b", "a"], ["a", "b"]]})
    'Alternated rounds: 2, seed 1, in this order: b a, a b.'
    """
    if not isinstance(alternation, dict):
        return None
    order = ", ".join(" ".join(names) for names in alternation["order"])
    return (
        f"Alternated {alternation['unit']}: {alternation['count']}, seed {alternation['seed']}, "
        f"in this order: {order}."
    )
