"""vLLM's own scheduler: first come, first served."""

from dataclasses import dataclass

from benchmarks.simulate.inside.blocks import Blocks
from benchmarks.simulate.inside.call import Call


@dataclass(frozen=True, slots=True)
class Step:
    """A step's work: calls that decode, and chunks of others' tokens."""

    decodes: tuple[Call, ...]
    chunks: tuple[tuple[Call, int], ...]

    @property
    def prefill_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)


class Scheduler:
    """Decides what a step computes, as vLLM 0.32 does (`v1/core/sched/scheduler.py`).

    Running calls go on first, in their order; a chunk is as large as what is left of the step.
    Where there is no room for it, the last one is preempted. Then, unless one was, waiting calls
    begin in their order, if there is room for all of their prompt. What ends, or is preempted,
    stays cached until its room is needed.

    Args:
        step_tokens: most tokens of a step (``max_num_batched_tokens``).
        most_calls: that run at a time (``max_num_seqs``).

    Attributes:
        expected_tokens, recomputed_tokens: what prompts repeat of the turn before, in whole blocks,
            and what of it was not found when they began first.
    """

    def __init__(self, blocks: Blocks, step_tokens: int = 8192, most_calls: int = 256) -> None:
        self.blocks = blocks
        self.step_tokens = step_tokens
        self.most_calls = most_calls
        self.waiting: list[Call] = []
        self.running: list[Call] = []
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.expected_tokens = 0
        self._history_tokens: dict[str, int] = {}

    def add(self, call: Call, now_s: float) -> None:
        """Add a call; ValueError: it can never run: its KV does not fit."""
        most = call.prompt_tokens + call.output_tokens
        if self.blocks.count(most) > self.blocks.total:
            raise ValueError(
                f"{call.key}: {most} tokens do not fit into {self.blocks.total} blocks"
            )
        call.came_s = call.since_s = now_s
        self.waiting.append(call)
        self._order_waiting()

    def forget(self, key: str) -> None:
        """End a conversation. vLLM is not told, and its KV stays until its room is needed."""
        self._history_tokens.pop(key, None)

    def found_tokens(self, call: Call) -> int:
        """Tokens of a call's prompt that are here, less its last: the next token comes of it."""
        size = self.blocks.block_tokens
        return min(self.blocks.found(call.key), (call.tokens - 1) // size) * size

    def takes(self, call: Call, now_s: float) -> None:
        """Hold blocks for a call's prompt that is prefilled elsewhere; ValueError: there is no
        room.
        """
        call.computed_tokens = self.found_tokens(call)
        self._begins(call, now_s)
        self.blocks.hold(call.key, self.blocks.count(call.tokens))

    def took(self, call: Call, now_s: float) -> bool:
        """Decode a call whose prompt was prefilled elsewhere; returns whether its first token ends
        it.
        """
        self._computed(call, call.prompt_tokens - call.found_tokens, now_s)
        self._put_out(call, 1, now_s)
        call.runs = call.decodes = True
        self.running.append(call)
        ended = call.made_tokens >= call.output_tokens
        if ended:
            self._end(call, now_s)
        return ended

    def schedule(self, now_s: float) -> Step | None:
        """Return what the next step computes; None: there is nothing to do."""
        scheduled: dict[Call, int] = {}
        self._left = self.step_tokens
        preempted = self._go_on(scheduled, now_s)
        if not preempted:
            self._begin(scheduled, now_s)
        if not scheduled:
            return None
        decodes = tuple(one for one in scheduled if one.decodes)
        chunks = tuple((one, tokens) for one, tokens in scheduled.items() if not one.decodes)
        return Step(decodes, chunks)

    def done(self, step: Step, lasted_s: float, now_s: float, steps: int = 1) -> list[Call]:
        """End a step, or several that only decoded (``lasted_s`` each); returns the calls that have
        ended.
        """
        ended = []
        for call in step.decodes:
            call.computed_tokens += steps
            if steps > 1:
                self.blocks.hold(call.key, self.blocks.count(call.computed_tokens))
            self._put_out(call, steps, now_s)
            if call.made_tokens >= call.output_tokens:
                ended.append(call)
        for call, tokens in step.chunks:
            call.computed_tokens += tokens
            self._computed(call, tokens, now_s)
            if not call.missing_tokens:
                call.decodes = True
                self._put_out(call, 1, now_s)
                if call.made_tokens >= call.output_tokens:
                    ended.append(call)
        for call in ended:
            self._end(call, now_s)
        return ended

    def steps_alike(self, step: Step) -> int:
        """How many steps like this one may follow each other before anything has to be decided; 1
        or more.
        """
        if step.chunks:
            return 1
        steps = min(call.output_tokens - call.made_tokens for call in step.decodes)
        size = self.blocks.block_tokens
        fitting = (self.blocks.free // len(step.decodes) - 1) * size
        return max(1, min(steps, fitting))

    def longest_s(self, step: Step) -> float | None:
        """How long nothing has to be decided at most; None: no bound."""
        return None

    # --- a step ------------------------------------------------------------------------------

    def _go_on(self, scheduled: dict[Call, int], now_s: float) -> bool:
        """Go on with running calls; return whether any of them was preempted."""
        preempted = False
        for call in list(self.running):
            if self._left <= 0:
                break
            # It may have been preempted for one before it.
            if not call.runs:
                continue
            tokens = self._chunk(call, min(call.missing_tokens, self._left))
            if tokens <= 0:
                continue
            while not self._make_room(call, tokens, now_s):
                victim = self._victim(now_s)
                self._left += scheduled.pop(victim, 0)
                self._preempt(victim, now_s)
                preempted = True
                if victim is call:
                    break
            else:
                self.blocks.hold(call.key, self.blocks.count(call.computed_tokens + tokens))
                scheduled[call] = tokens
                self._left -= tokens
        return preempted

    def _begin(self, scheduled: dict[Call, int], now_s: float) -> None:
        while self.waiting and self._left > 0 and len(self.running) < self.most_calls:
            call = self.waiting[0]
            call.computed_tokens = self.found_tokens(call)
            tokens = self._chunk(call, min(call.missing_tokens, self._left))
            if tokens <= 0 or not self._make_room_for_all(call, now_s):
                call.computed_tokens = 0
                return
            del self.waiting[0]
            call.runs = True
            self.running.append(call)
            self._begins(call, now_s)
            self.blocks.hold(call.key, self.blocks.count(call.computed_tokens + tokens))
            scheduled[call] = tokens
            self._left -= tokens

    def _end(self, call: Call, now_s: float) -> None:
        self.running.remove(call)
        call.runs = False
        self._ends(call, now_s)
        self._history_tokens[call.key] = call.computed_tokens

    def _put_out(self, call: Call, tokens: int, now_s: float) -> None:
        call.made_tokens += tokens
        if call.first_token_s < 0:
            call.first_token_s = now_s
        else:
            call.gaps_s += [(now_s - call.last_token_s) / tokens] * tokens
        call.last_token_s = now_s

    def _begins(self, call: Call, now_s: float) -> None:
        if call.found_tokens < 0:
            call.found_tokens = call.computed_tokens
            had = min(self._history_tokens.get(call.key, 0), call.prompt_tokens)
            whole = had // self.blocks.block_tokens * self.blocks.block_tokens
            self.expected_tokens += whole
            self.recomputed_tokens += max(0, whole - call.found_tokens)

    def _preempt(self, call: Call, now_s: float) -> None:
        self.preemptions += 1
        self.running.remove(call)
        self.blocks.let_go(call.key, call.computed_tokens)
        call.computed_tokens, call.since_s = 0, now_s
        call.runs = call.decodes = False
        call.preemptions += 1
        # As vLLM's: before those who wait.
        self.waiting.insert(0, call)
        self._order_waiting()

    def _ends(self, call: Call, now_s: float) -> None:
        self.blocks.let_go(call.key, call.computed_tokens)

    # --- what others decide differently ------------------------------------------------------

    def _order_waiting(self) -> None: ...

    def _chunk(self, call: Call, tokens: int) -> int:
        """How many tokens of a call the step computes; 0: none of it now."""
        return tokens

    def _make_room(self, call: Call, tokens: int, now_s: float) -> bool:
        return self.blocks.has_room(call.key, self.blocks.count(call.computed_tokens + tokens))

    def _make_room_for_all(self, call: Call, now_s: float) -> bool:
        return self.blocks.has_room(call.key, self.blocks.count(call.tokens))

    def _victim(self, now_s: float) -> Call:
        return self.running[-1]

    def _computed(self, call: Call, tokens: int, now_s: float) -> None: ...
