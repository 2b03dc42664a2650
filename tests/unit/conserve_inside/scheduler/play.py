"""Random turns of conversations, with all that may happen to them, on an engine without a model."""

import random
from dataclasses import dataclass

from conserve_inside.scheduler.commands import Observe, Pin, Release, obey
from tests.unit.conserve_inside.scheduler.stand_in import StandIn
from tests.unit.deployments.engine.stepping import words

POLICIES = {
    "feedback": {"quota_tokens": 256, "age_s": 0.5, "window_s": 5.0},
    "chunks": {"late_s": 0.02, "interval_s": 0.05},
    "retention": {"hold_s": 0.3},
}


@dataclass
class Played:
    """What was seen.

    Attributes:
        turns: those that ended, cut ones included.
    """

    turns: int = 0
    aborted: int = 0
    preempted: int = 0
    reclaimed_blocks: int = 0
    cut: int = 0
    parts: int = 0
    released: int = 0


def play(engine: StandIn, seed: int, conversations: int = 10, turns: int = 6) -> Played:
    """Play until all have ended.

    Raises:
        AssertionError: a turn is lost, a token is wrong, or a block is not free at the end.
    """
    chance, seen = random.Random(seed), Played()
    history: dict[str, list[int]] = {}
    due = [(chance.random() * 3, f"c{number}", 0) for number in range(conversations)]
    scheduler = engine.scheduler
    for _ in range(20_000):
        if not due and not engine.live and not engine._flight:
            break
        for one in [one for one in due if one[0] <= engine.now_s]:
            due.remove(one)
            _, key, turn = one
            sizes = (20, 60, 200, 500) if turn else (40, 300, 700)
            prompt = history.get(key, []) + words(chance, chance.choice(sizes))
            if len(prompt) > 1_500:
                continue
            history[key] = prompt
            engine.add(
                f"{key}.{turn}",
                prompt,
                chance.randrange(2, 60),
                key,
                chance.choice((None, 0.2, 30.0)),
                chance.random() < 0.1,
                background=chance.random() < 0.5,
                priority=chance.randrange(-5, 5),
            )
        if engine.live and chance.random() < 0.004:
            engine.abort(chance.choice(sorted(engine.live)))
            seen.aborted += 1
            seen.turns += 1
        if chance.random() < 0.05 and (keys := scheduler.histories.keys()):
            key = chance.choice(keys)
            command = chance.choice((Release([key]), Pin({key: 2.0}), Observe()))
            done = obey(scheduler, command)
            if isinstance(command, Release):
                assert isinstance(done, int)
                seen.released += done
        if not engine.live and due:
            engine.now_s = max(engine.now_s, min(due)[0])
        for request in engine.step():
            seen.turns += 1
            key, turn = request.request_id.split(".")
            history[key] = history[key] + list(request.output_token_ids)
            if int(turn) + 1 < turns:
                due.append((engine.now_s + chance.random(), key, int(turn) + 1))
    assert not engine.live, f"seed {seed}: {sorted(engine.live)} never end"
    assert not engine.wrong, f"seed {seed}: {engine.wrong} have wrong tokens"
    counts = scheduler.counts
    seen.preempted, seen.parts = sum(counts.preempted), counts.parts
    seen.cut = sum(counts.cut.values())
    seen.reclaimed_blocks = scheduler.histories.reclaimed_blocks
    engine.require_no_leak()
    return seen
