"""A scheduler that knows conversations: the classes of `conserve.engine_scheduling`, applied as
`deployments.engine.scheduler` has vLLM apply them, and each of them can be left out."""

import math
from dataclasses import dataclass, field
from typing import Any

from benchmarks.simulate.inside.blocks import Blocks
from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.scheduler import Scheduler, Step
from conserve.engine_scheduling import ChunkController, FeedbackQueue, Pin, Retention

# As in `deployments.engine.scheduler.scheduling`.
_APPEND_TOKENS = 128
_LEVEL = 1 << 32
# A waiting call is ranked anew this often while it rises by a level. Live it is every 50 ms, which
# for hundreds that wait would take most of the simulation.
_RANKS_A_LEVEL = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that are on, and their settings.

    Attributes:
        order: levels decide the order of calls; else arrival does.
        by_conversation: without levels, the conversation's arrival counts.
        chunks: prefills beside decodes are cut.
        retention: what a turn leaves is kept for the next one.
        in_parts: a prompt without room for all of it begins with a part.
    """

    order: bool = True
    by_conversation: bool = False
    chunks: bool = True
    retention: bool = True
    in_parts: bool = True
    feedback: dict[str, Any] = field(default_factory=dict)
    chunking: dict[str, Any] = field(default_factory=dict)
    keeping: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _History:
    until_s: float = 0.0
    level: int = 0
    ended_s: float | None = None
    waits: bool = False


class ConversationScheduler(Scheduler):
    def __init__(
        self,
        blocks: Blocks,
        step_tokens: int = 8192,
        most_calls: int = 256,
        parts: Parts | None = None,
    ) -> None:
        super().__init__(blocks, step_tokens, most_calls)
        self.parts = parts or Parts()
        capacity_tokens = blocks.total * blocks.block_tokens
        self.queue = FeedbackQueue(capacity_tokens, **self.parts.feedback)
        least = min(step_tokens, blocks.block_tokens + _APPEND_TOKENS)
        bounds = {"least_tokens": least, "most_tokens": step_tokens}
        self.controller = ChunkController(**{**bounds, **self.parts.chunking})
        self.retention = Retention(**self.parts.keeping)
        self.reclaimed_blocks = 0
        self.parts_begun = 0
        self._histories: dict[str, _History] = {}
        self._now_s = 0.0
        self._rank_at_s = 0.0
        self._ranks_every_s = self.parts.feedback.get("age_s", 2.0) / _RANKS_A_LEVEL
        self._limit: int | None = None
        self._limit_left = 0
        self._decoding = False
        self._left_to_waiting: list[int] = []
        self._part: Call | None = None

    # --- turns -------------------------------------------------------------------------------

    def add(self, call: Call, now_s: float) -> None:
        history = self._histories.setdefault(call.key, _History())
        if history.ended_s is not None:
            self.retention.returned(call.key, now_s - history.ended_s)
        history.waits = True
        found = self.blocks.found(call.key) * self.blocks.block_tokens
        call.missed_tokens = max(1, call.prompt_tokens - found)
        call.since_s = now_s
        call.level = self._level(call, now_s)
        super().add(call, now_s)

    def forget(self, key: str) -> None:
        super().forget(key)
        self.blocks.drop(key)
        self.queue.forget(key)
        self.retention.forget(key)
        self._histories.pop(key, None)

    def _begins(self, call: Call, now_s: float) -> None:
        super()._begins(call, now_s)
        self._histories.setdefault(call.key, _History()).waits = False

    def _preempt(self, call: Call, now_s: float) -> None:
        self._charge_decodes(call, now_s)
        if call is self._part:
            self._part = None
        call.missed_tokens = call.tokens
        self._histories[call.key].waits = True
        super()._preempt(call, now_s)
        call.level = self._level(call, now_s)
        self._order_waiting()

    def _ends(self, call: Call, now_s: float) -> None:
        self._charge_decodes(call, now_s)
        super()._ends(call, now_s)
        history = self._histories[call.key]
        history.ended_s = now_s
        history.level = self._base_level(call, 0.0, now_s)
        if self.parts.retention:
            hold_s = self.retention.hold_for_s(call.key, call.resume_s, call.last)
            if hold_s > 0:
                history.until_s = now_s + hold_s
                self.blocks.keep(call.key)

    # --- a step ------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> Step | None:
        self._now_s = now_s
        self._expire(now_s)
        if self._part is not None and (self._part.decodes or not self._part.runs):
            self._part = None
        if self.waiting and now_s >= self._rank_at_s:
            for call in self.waiting:
                call.level = self._level(call, now_s)
            self._order_waiting()
            self._rank_at_s = now_s + self._ranks_every_s
        self._set_limit(now_s)
        return super().schedule(now_s)

    def done(self, step: Step, lasted_s: float, now_s: float, steps: int = 1) -> list[Call]:
        if step.decodes:
            for number in range(steps):
                at_s = now_s - lasted_s * (steps - 1 - number)
                self.controller.step(lasted_s, step.prefill_tokens, at_s, len(step.decodes))
        return super().done(step, lasted_s, now_s, steps)

    def longest_s(self, step: Step) -> float | None:
        return self._ranks_every_s if self.waiting else None

    def _set_limit(self, now_s: float) -> None:
        self._decoding = any(one.decodes for one in self.running)
        prefills = [one for one in self.running if not one.decodes]
        self._limit = None
        if not (prefills or self.waiting) or not (self._decoding or self.waiting):
            return
        most = self.step_tokens
        cuts = self._decoding and self.parts.chunks
        self._limit = self._limit_left = self.controller.allowed_tokens() if cuts else most
        self._left_to_waiting = [0] * (self.queue.levels + 1)
        if not prefills:
            return
        # Those who decode first, so that a step that is full leaves none of them out.
        self.running.sort(key=lambda one: self._rank_running(one, now_s))
        if self.parts.order and self.waiting and len(self.running) < self.most_calls:
            for call in self.waiting:
                self._left_to_waiting[call.level + 1] += call.missed_tokens
            for level in range(1, len(self._left_to_waiting)):
                self._left_to_waiting[level] += self._left_to_waiting[level - 1]

    def _rank_running(self, call: Call, now_s: float) -> tuple[int, float]:
        return (-1, 0.0) if call.decodes else (self._level(call, now_s), self._came_s(call))

    # --- order -------------------------------------------------------------------------------

    def _came_s(self, call: Call) -> float:
        return call.conversation_came_s if self.parts.by_conversation else call.came_s

    def _level(self, call: Call, now_s: float) -> int:
        return self._base_level(call, 0.0 if call.runs else now_s - call.since_s, now_s)

    def _base_level(self, call: Call, waited_s: float, now_s: float) -> int:
        if not self.parts.order:
            return 0
        return self.queue.level(call.key, call.tokens, waited_s, now_s)

    def _order_waiting(self) -> None:
        self.waiting.sort(key=lambda one: (one.level, self._came_s(one)))

    def _victim(self, now_s: float) -> Call:
        def rank(call: Call) -> tuple[int, float]:
            if not self.parts.order:
                return 0, self._came_s(call)
            self._charge_decodes(call, now_s)
            blocks = self.blocks.count(call.computed_tokens)
            return self._level(call, now_s) * _LEVEL + blocks, call.came_s

        return max(self.running, key=rank)

    def _computed(self, call: Call, tokens: int, now_s: float) -> None:
        # What is computed again is no service that it asked for.
        done = call.computed_tokens
        new = done - max(call.charged_tokens, done - tokens)
        if new > 0:
            self.queue.serve(call.key, new, 0, now_s)
            call.charged_tokens = done

    def _charge_decodes(self, call: Call, now_s: float) -> None:
        new = call.computed_tokens - call.charged_tokens
        if call.decodes and new > 0 and call.charged_tokens:
            self.queue.serve(call.key, 0, new, now_s)
            call.charged_tokens = call.computed_tokens

    # --- chunks ------------------------------------------------------------------------------

    def _chunk(self, call: Call, tokens: int) -> int:
        if call.decodes:
            return tokens
        if self._limit is not None:
            tokens = self._limited(call, tokens)
        if tokens and self.parts.in_parts:
            tokens = self._fitting(call, tokens)
        if self._limit is not None:
            self._limit_left = max(0, self._limit_left - tokens)
        return tokens

    def _limited(self, call: Call, tokens: int) -> int:
        size, limit = self.blocks.block_tokens, self._limit_left
        if call.runs:
            left_to_others = self._left_to_waiting[self._level(call, self._now_s)]
            # It never stands still for them.
            limit = min(limit, max(size, self._limit_left - left_to_others))
        if tokens <= limit:
            return tokens
        if limit < size and self._limit_left < (self._limit or 0):
            allowed = 0
        else:
            allowed = self._whole_blocks(call.computed_tokens, tokens, limit)
        if self._decoding:
            self.controller.was_cut()
        return allowed

    def _fitting(self, call: Call, tokens: int) -> int:
        """A part of a prompt without room for all of it, under the guards of
        `deployments.engine.scheduler.turns`."""
        blocks, size = self.blocks, self.blocks.block_tokens
        runs = call.runs
        wanted = call.computed_tokens + tokens if runs else call.tokens
        if blocks.has_room(call.key, blocks.count(wanted)):
            return tokens
        decodes = sum(one.decodes for one in self.running)
        if not runs and (self._part is not None or call.preemptions):
            return tokens
        have = blocks.held.get(call.key, 0) + blocks.kept.get(call.key, 0)
        room = (have + blocks.free - decodes) * size - call.computed_tokens
        if room < size:
            if runs and blocks.kept:
                return self._whole_blocks(call.computed_tokens, tokens, size)
            return 0 if runs and decodes else tokens
        if not runs:
            self._part = call
            self.parts_begun += 1
        return self._whole_blocks(call.computed_tokens, tokens, room)

    def _whole_blocks(self, start: int, tokens: int, limit: int) -> int:
        if tokens <= limit:
            return tokens
        size = self.blocks.block_tokens
        end = (start + limit) // size * size
        return end - start if end > start else limit

    # --- room --------------------------------------------------------------------------------

    def _make_room(self, call: Call, tokens: int, now_s: float) -> bool:
        while not super()._make_room(call, tokens, now_s):
            missing = self.blocks.count(call.computed_tokens + tokens)
            missing -= self.blocks.held.get(call.key, 0) + self.blocks.free
            if not self._give_up(missing, now_s, but=call.key):
                return False
        return True

    def _make_room_for_all(self, call: Call, now_s: float) -> bool:
        if call is self._part:
            # A part of it was found to fit.
            return True
        blocks = self.blocks
        need = blocks.count(call.tokens) - blocks.kept.get(call.key, 0)
        others = sum(blocks.kept.values()) - blocks.kept.get(call.key, 0)
        if need > blocks.free + others:
            return False
        while need > blocks.free:
            self._give_up(need - blocks.free, now_s, but=call.key)
        return True

    # --- between turns -----------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        for key in [
            key
            for key in self.blocks.kept
            if self._histories[key].until_s <= now_s and not self._histories[key].waits
        ]:
            self.blocks.unkeep(key)

    def _give_up(self, blocks: int, now_s: float, but: str) -> bool:
        pins = {}
        for key, kept in self.blocks.kept.items():
            if key != but:
                one = self._histories[key]
                pins[key] = Pin(one.level, kept, one.until_s, one.waits)
        order = self.retention.give_up_order(pins, now_s)
        if not order:
            return False
        self.reclaimed_blocks += self.blocks.unkeep(order[0], blocks)
        return True


def time_to_live(seconds: float) -> Parts:
    """Continuum, as MARS's paper has it for a baseline (section 6.2): first come, first served by
    conversation, and what a turn leaves is kept for this time unless it is needed.
    """
    keeping = {"hold_s": seconds, "longest_s": seconds}
    return Parts(order=False, by_conversation=True, chunks=False, in_parts=False, keeping=keeping)


def attained_service() -> Parts:
    """Autellix (PLAS), as MARS's paper has it for a baseline: the least served conversation goes
    first.

    Service is never forgotten; a minute's wait rises by one level.
    """
    feedback = {
        "footprints": (),
        "levels": 8,
        "quota_tokens": 4096.0,
        "window_s": math.inf,
        "age_s": 60.0,
    }
    return Parts(chunks=False, retention=False, in_parts=False, feedback=feedback)
