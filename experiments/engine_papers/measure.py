"""Every system at every point, with each seed."""

from collections.abc import Callable, Sequence
from typing import TypeVar

_System = TypeVar("_System")
_Point = TypeVar("_Point")
_Outcome = TypeVar("_Outcome")


def measure(
    run: Callable[[_System, _Point, int], _Outcome],
    points: Sequence[_Point],
    systems: Sequence[_System],
    seeds: Sequence[int],
    on_run: Callable[[], None],
) -> list[_Outcome]:
    """Return what came out of each run.

    Args:
        run: one of them: a system at a point with a seed.
        on_run: called after each.
    """
    found = []
    for point in points:
        for seed in seeds:
            for system in systems:
                found.append(run(system, point, seed))
                on_run()
    return found
