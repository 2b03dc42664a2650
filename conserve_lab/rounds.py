"""Several systems in short alternating rounds: what else a machine does then hits all alike."""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from conserve_lab.client import Endpoint
from conserve_lab.driver import ArrivalPlan, DriveOptions, Lag, Progress, Run, drive
from conserve_lab.records import TurnRecord

ROUND = "/"
"""Stands between a round's number and a conversation's id, where rounds are pooled."""

Unit = Literal["rounds", "starts"]


@dataclass(frozen=True, slots=True)
class Alternation:
    """How systems took turns: in ``rounds`` of systems that are up at the same time, or ``starts``
    of one at a time; ``order`` has the systems of each, as drawn from ``seed``.
    """

    unit: Unit
    seed: int
    order: list[list[str]]

    @property
    def count(self) -> int:
        return len(self.order)

    def describe(self) -> dict[str, object]:
        return {"unit": self.unit, "count": self.count, "seed": self.seed, "order": self.order}


def orders(systems: Sequence[str], count: int, seed: int) -> list[list[str]]:
    """Draw orders at random, in which every system is as often first, second and so on.

    Of as many orders as there are systems, each system has each place once (a Latin square whose
    rows, columns and names are drawn). Equal seeds give equal orders; a larger count continues a
    smaller one's.

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
    """Say in one sentence what `Alternation.describe` gave; None: the systems did not take turns.

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


async def alternate(
    endpoints: Sequence[Endpoint],
    plan_of: Callable[[int], ArrivalPlan],
    rounds: int,
    options: DriveOptions | None = None,
    *,
    seed: int = 0,
    on_record: Callable[[TurnRecord], None] | None = None,
    on_progress: Callable[[Endpoint, int, Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> dict[str, list[Run]]:
    """Run the same slices of a workload on several systems, round by round, in `orders`.

    Args:
        plan_of: makes the plan of a round (from 0) anew each time it is called.
        stop: ends the comparison; a round that not every system has finished is left out.

    Returns:
        By system, its runs, one a round. Raises what `conserve_lab.driver.drive` raises.
    """
    options = options or DriveOptions()
    by_name = {endpoint.system: endpoint for endpoint in endpoints}
    found: dict[str, list[Run]] = {endpoint.system: [] for endpoint in endpoints}
    for round_, names in enumerate(orders(list(by_name), rounds, seed)):
        here: dict[str, Run] = {}
        for endpoint in (by_name[name] for name in names):
            # Two names may stand for one server; nothing of another round may be in its caches.
            mark = f"{round_}-{endpoint.system}-"
            salt = options.cache_salt
            here[endpoint.system] = await drive(
                endpoint,
                plan_of(round_),
                replace(
                    options,
                    id_prefix=options.id_prefix + mark,
                    cache_salt=None if salt is None else mark + salt,
                ),
                on_record=on_record,
                on_progress=_about(on_progress, endpoint, round_),
                stop=stop,
                proven=round_ > 0,
            )
            if stop is not None and stop.is_set():
                return found
        for system, run in here.items():
            found[system].append(run)
    return found


def _about(
    on_progress: Callable[[Endpoint, int, Progress], None] | None, endpoint: Endpoint, round_: int
) -> Callable[[Progress], None] | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(endpoint, round_, progress)


def pooled(runs: Sequence[Run]) -> Run:
    """All rounds of a system as one run: conversations are told apart by the round."""
    if not runs:
        raise ValueError("no round was finished by every system")
    records: list[TurnRecord] = []
    offset_s = 0.0
    for round_, run in enumerate(runs):
        records += [_moved(record, round_, offset_s) for record in run.records]
        offset_s += run.wall_s
    lags = [run.lag for run in runs]
    return Run(
        system=runs[0].system,
        records=records,
        lag=Lag(
            statistics.median(lag.loop_p50_s for lag in lags),
            max(lag.loop_p99_s for lag in lags),
            max(lag.loop_max_s for lag in lags),
            max(lag.send_p99_s for lag in lags),
            statistics.mean(lag.cpu_share for lag in lags),
        ),
        wall_s=offset_s,
        arrived=sum(run.arrived for run in runs),
        interrupted=any(run.interrupted for run in runs),
        wrong_lengths=sum(run.wrong_lengths for run in runs),
        not_released=sum(run.not_released for run in runs),
        counters=_summed([run.counters for run in runs]),
        energy_j=_total([run.energy_j for run in runs]),
    )


def _summed(counters: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    total: Counter[str] = Counter()
    for risen in counters:
        if risen is None:
            return None
        total.update(risen)
    return dict(total)


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _moved(record: TurnRecord, round_: int, offset_s: float) -> TurnRecord:
    first_s = record.first_token_s
    return replace(
        record,
        conversation=f"{round_}{ROUND}{record.conversation}",
        planned_s=record.planned_s + offset_s,
        sent_s=record.sent_s + offset_s,
        ended_s=record.ended_s + offset_s,
        first_token_s=None if first_s is None else first_s + offset_s,
        token_times_s=tuple(time_s + offset_s for time_s in record.token_times_s),
    )
