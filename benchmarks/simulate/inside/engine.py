"""One engine in virtual time: a scheduler's steps, one after the other."""

import math
from collections.abc import Callable

from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.costs import Steps
from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.scheduler import Scheduler, Step


class Engine:
    """Runs a scheduler's steps, one after the other.

    Steps that only decode are taken together up to the next at which anything may change. A step
    under way is not broken off: a call that comes waits for its end.
    """

    def __init__(
        self, loop: Loop, scheduler: Scheduler, costs: Steps, ended: Callable[[Call], None]
    ) -> None:
        self._loop = loop
        self.scheduler = scheduler
        self._costs = costs
        self._ended = ended
        self._runs = False
        self.busy_s = 0.0
        self.prefilled_tokens = 0
        self.decoded_tokens = 0

    def submit(self, call: Call) -> None:
        self.scheduler.add(call, self._loop.now_s)
        self._wake()

    def _wake(self) -> None:
        if not self._runs:
            # All that comes at this moment is there before the step begins.
            self._runs = True
            self._loop.at(self._loop.now_s, self._step)

    def _step(self) -> None:
        now_s = self._loop.now_s
        # Where the one that ran was preempted there is room now.
        step = self.scheduler.schedule(now_s) or self.scheduler.schedule(now_s)
        self._runs = step is not None
        if step is None:
            if self.scheduler.waiting:
                raise RuntimeError(f"{len(self.scheduler.waiting)} calls wait, and none can begin")
            return
        kv_tokens = sum(call.computed_tokens for call in step.decodes)
        chunks = [(tokens, call.computed_tokens) for call, tokens in step.chunks]
        first_s = self._costs.step_s(len(step.decodes), kv_tokens, chunks)
        steps = 1 if step.chunks else self._together(step, first_s, now_s)
        growth_s = self._costs.per_kv_token_s * len(step.decodes)
        took_s = steps * first_s + growth_s * steps * (steps - 1) / 2
        self.busy_s += took_s
        self.prefilled_tokens += step.prefill_tokens
        self.decoded_tokens += steps * len(step.decodes)
        self._loop.at(now_s + took_s, self._done, step, took_s / steps, steps)

    def _together(self, step: Step, first_s: float, now_s: float) -> int:
        """How many steps are alike, the one in which something happens included."""
        within_s = self._loop.next_s - now_s
        longest_s = self.scheduler.longest_s(step)
        if longest_s is not None:
            within_s = min(within_s, longest_s)
        most = self.scheduler.steps_alike(step)
        return most if within_s == math.inf else min(most, max(1, math.ceil(within_s / first_s)))

    def _done(self, step: Step, lasted_s: float, steps: int) -> None:
        now_s = self._loop.now_s
        for call in self.scheduler.done(step, lasted_s, now_s, steps):
            self._ended(call)
        self._step()
