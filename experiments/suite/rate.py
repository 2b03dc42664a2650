"""Does what comes before a measurement: warming up, the rate, and the unloaded reference."""

import time
from dataclasses import replace
from itertools import islice

from benchmarks.client import Endpoint, with_model
from benchmarks.driver import DriveOptions, drive, unloaded
from benchmarks.peers import PeerUnavailable
from benchmarks.records import Answer, Script, TurnRequest
from benchmarks.selection import Selection

# First conversations cost an engine more than later ones; these come before the measurement.
_WARM_UP_CONVERSATIONS = 2
_WARM_UP_SEED_SHIFT = 500_009


async def warm_up(endpoint: Endpoint, selection: Selection) -> None:
    """Run some conversations that do not count.

    Raises:
        PeerUnavailable: none of their turns was completed.
        EndpointError: the first one was refused.
    """
    warming = replace(
        selection,
        seed=selection.seed + _WARM_UP_SEED_SHIFT,
        conversations=_WARM_UP_CONVERSATIONS,
        pattern="together",
        scale_gaps=0.0,
    )
    mark = f"warm-{time.time_ns()}-"
    run = await drive(endpoint, warming.workload(), DriveOptions(cache_salt=mark, id_prefix=mark))
    if not any(turn.outcome == "completed" for turn in run.records):
        raise PeerUnavailable(f"{endpoint.system}: no turn was completed while it was warmed up")


class _FirstTurn:
    """A conversation that ends with its first turn, one token long."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.conversation = script.conversation

    def next(self, answer: Answer | None) -> TurnRequest | None:
        turn = None if answer is not None else self._script.next(None)
        if turn is None:
            return None
        body = turn.body
        return replace(
            turn,
            body=lambda: {**body(), "min_tokens": 1, "max_tokens": 1},
            output_tokens=1,
        )


async def sustained_rate(endpoint: Endpoint, selection: Selection, rounds: int) -> float:
    """Sessions a second whose first turns, sub-agents' included, ConServe gets done in a row.

    Raises:
        PeerUnavailable: a turn failed.
        EndpointError: the first one was refused.
    """
    endpoint = await with_model(endpoint)
    salt, agents, turns_s = f"rate-{time.time_ns()}", 0, []
    # These are the very conversations that are measured later: others' prompts have another mean
    # length.
    for round_ in range(rounds):
        workload = selection.workload(seed_shift=round_)
        agents += workload.counts["conversations"]
        # The first ones also pay for what engines do once.
        parts = [("measured", None)] if round_ else [("warm", 2), ("measured", None)]
        for part, count in parts:
            mark = f"{salt}-{round_}-{part}-"
            scripts = (_FirstTurn(script) for _, script in islice(workload, count))
            run = await unloaded(endpoint, scripts, DriveOptions(cache_salt=mark, id_prefix=mark))
            if any(turn.outcome != "completed" for turn in run.records) or not run.records:
                raise PeerUnavailable("first turns failed while the prefiller's rate was measured")
        turns_s += [turn.ended_s - turn.sent_s for turn in run.records]
    mean_s = sum(turns_s) / len(turns_s)
    return 1 / (mean_s * agents / (rounds * selection.conversations))
