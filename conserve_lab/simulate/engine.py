"""One simulated engine: continuous batching with chunked prefill, whose state changes by event.

It models vLLM's scheduler on an engine whose step takes what a profile says: first come, first
served, or by priority; decodes before prefills; prefills in chunks. When KV runs out, the last in
that order is preempted, and stays in the prefix cache until its room is needed. Steps without a
prefill are taken together up to the next one at which anything changes: with ``b`` decodes the KV
that is read grows by ``b`` tokens a step, so ``m`` steps take

    m (step_s + per_sequence_s b + per_kv_token_s k) + per_kv_token_s b m (m - 1) / 2

seconds. Solving that for ``m`` finds the step under way at a time. So a turn costs a few events,
however many tokens it has.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from conserve.placement import EngineLoad, Step
from conserve_lab.records import SharedPrefix
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.shared import SharedPrefixes, Stretch

# Float noise, in steps: a turn that comes at a step's end is not to wait for another one.
_EPSILON_STEPS = 1e-9
# A live engine tells of no more at a time.
_MOST_STEPS = 64


@dataclass(eq=False, slots=True)
class EngineTurn:
    """A turn on one engine.

    Attributes:
        output_tokens: one on a prefiller.
        reusable_tokens: length of the prompt's prefix that an earlier turn had as well.
        loaded_tokens: prompt tokens whose KV a handoff brought here.
        load_s: how long loading that KV keeps the engine busy; 0 where it goes on meanwhile.
        turn: the caller's own.
        priority: the lowest goes first, then the oldest (vLLM's ``--scheduling-policy priority``).
        shared: what the prompt begins with that other conversations' prompts do, too.
        cached_tokens: prompt tokens whose KV was here already, a handoff not counted.
        admitted_s, first_token_s: negative before.
    """

    conversation: str
    prompt_tokens: int
    output_tokens: int
    reusable_tokens: int = 0
    loaded_tokens: int = 0
    load_s: float = 0.0
    turn: Any = None
    priority: float = 0.0
    shared: tuple[SharedPrefix, ...] = ()
    # How many came before it, to this engine.
    came: int = -1
    cached_tokens: int = 0
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    made_tokens: int = 0
    # How many of the tokens to prefill (the prompt; after a preemption what was put out, too)
    # are there, and how many are left.
    past_tokens: int = 0
    left_tokens: int = 0
    begun: bool = False
    preempted: bool = False
    # While it decodes: the step at whose end it is done, and which admission this was.
    finish_step: int = -1
    number: int = -1

    @property
    def shared_tokens(self) -> int:
        return self.shared[-1].tokens if self.shared else 0


class SimulatedEngine:
    """One engine. It has the caller call `wake` at a time and with a version, by ``schedule``.

    Attributes:
        busy_prefill_s, busy_decode_s: how long it ran steps with and without a prefill.
        active_tokens: KV of turns that run or are prefilled, what they share once.
        idle_tokens: KV of conversations between turns, and shared prefixes that no turn holds.
        evicted_tokens, preemptions: idle KV dropped, and turns preempted, because KV ran out.
        shared_found_tokens: found of shared prefixes, where a turn's own history was not here and
            nothing was handed off.
    """

    def __init__(
        self,
        id: str,
        costs: Costs,
        schedule: Callable[[float, "SimulatedEngine", int], None],
        finished: Callable[[EngineTurn, "SimulatedEngine", float], None],
        *,
        prefilled: Callable[[EngineTurn, float], None] = lambda work, now_s: None,
        keeps: bool = True,
        max_sequences: int = 256,
        block_tokens: int = 16,
    ) -> None:
        self.id = id
        self.costs = costs
        self._schedule = schedule
        self._finished = finished
        self._tells = prefilled
        self._keeps = keeps
        self._max_sequences = max_sequences
        self._block_tokens = block_tokens
        self._came = 0
        self._waiting: deque[EngineTurn] = deque()
        self._prefilling: deque[EngineTurn] = deque()
        self._decoding: dict[EngineTurn, None] = {}
        # (finish_step, number, turn); one whose turn has another number by now was preempted.
        self._finishes: list[tuple[int, int, EngineTurn]] = []
        self._idle: dict[str | Stretch, int] = {}
        self._shared = SharedPrefixes(block_tokens, self._idle)
        # Until when idle KV is not to be dropped, the earliest pinned first.
        self._pins: dict[str, float] = {}
        self._now_s = 0.0
        self._kv_tokens = 0  # What the next step's decodes read.
        self._step = self._admitted = 0
        # The steps under way: when they began, how many, and whose prefill ends with them.
        self._version = self._steps = 0
        self._began_s = self._first_step_s = 0.0
        self._completing: list[EngineTurn] = []
        self._under_way = self._has_prefill = False
        # Of the step under way, what it prefills, its pairs of tokens, and its loads' time.
        self._chunk_tokens = self._chunk_pairs = 0
        self._loads_s = 0.0
        self._taken: list[Step] = []
        self._changing = False
        self.busy_prefill_s = self.busy_decode_s = 0.0
        self.computed_tokens = self.active_tokens = self.idle_tokens = self.evicted_tokens = 0
        self.preemptions = self.shared_found_tokens = 0

    def submit(self, work: EngineTurn, now_s: float) -> None:
        """Take a turn in; it waits for the step under way to end."""
        work.came = self._came
        self._came += 1
        work.shared = self._shared.whole_blocks(work.shared) if self._keeps else ()
        self._wait(work)
        if self._changing:
            return
        if not self._under_way:
            self._start(now_s)
        elif not self._has_prefill:
            self._cut(now_s)

    @property
    def capacity_tokens(self) -> int:
        return self.costs.capacity_tokens

    @property
    def load(self) -> EngineLoad:
        prefilling = sum(work.left_tokens for work in self._prefilling)
        waiting = sum(self._missing(work) for work in self._waiting)
        costs, decodes = self.costs, len(self._decoding)
        step_s = (
            costs.step_s + costs.per_sequence_s * decodes + costs.per_kv_token_s * self._kv_tokens
        )
        return EngineLoad(prefilling + waiting, decodes, step_s)

    def _missing(self, work: EngineTurn) -> int:
        here = self.finds(work)
        tokens = work.prompt_tokens + work.made_tokens
        return max(1, tokens - max(here, work.loaded_tokens))

    @property
    def turns(self) -> int:
        running = len(self._prefilling) + len(self._completing) + len(self._decoding)
        return len(self._waiting) + running

    def pin(self, conversation: str, until_s: float) -> None:
        """Keep a conversation's idle KV until then, unless turns that run need its room."""
        if conversation not in self._pins:
            self._take(self._shared.begins(conversation))
        self._pins[conversation] = until_s

    def unpin(self, conversation: str) -> None:
        if self._pins.pop(conversation, None) is not None:
            self._leave(self._shared.begins(conversation))

    def holds(self, conversation: str) -> int:
        """Tokens of KV kept for a conversation between its turns, with what others share."""
        own = self._idle.get(conversation, 0)
        begins = self._shared.begins(conversation)
        if not own or not begins:
            return own
        found = self._shared.found(begins)
        return found + own if found == begins[-1].tokens else found

    def finds(self, work: EngineTurn) -> int:
        """Return the tokens of a turn's prompt whose KV is here."""
        own = min(self.holds(work.conversation), work.reusable_tokens)
        if not work.shared or not self._keeps:
            return own
        return max(own, self._shared.found(self._shared.whole_blocks(work.shared)))

    def forget(self, conversation: str) -> None:
        self.unpin(conversation)
        self.idle_tokens -= self._idle.pop(conversation, 0)
        self._shared.forget(conversation)

    def wake(self, now_s: float, version: int) -> None:
        """End the steps under way, if they are still those that were scheduled."""
        if version != self._version:
            return
        self._under_way = False
        self._changing = True
        taken_s, steps = now_s - self._began_s, self._steps
        if steps and len(self._taken) < _MOST_STEPS:
            self._taken.append(self._step_taken(taken_s, steps))
        if self._has_prefill:
            self.busy_prefill_s += taken_s
        else:
            self.busy_decode_s += taken_s
        if self._decoding:
            grown = len(self._decoding) * steps
            self._step += steps
            self._kv_tokens += grown
            self.active_tokens += grown
            self.computed_tokens += grown
            finishes, step = self._finishes, self._step
            while finishes and finishes[0][0] <= step:
                _, number, work = heappop(finishes)
                if work.number == number:
                    del self._decoding[work]
                    work.made_tokens = work.output_tokens
                    self._kv_tokens -= work.prompt_tokens + work.output_tokens
                    self._end(work, now_s)
        if self._completing:
            for work in self._completing:
                self._prefilled(work, now_s)
            self._completing = []
        self._changing = False
        self._start(now_s)

    def _step_taken(self, taken_s: float, steps: int) -> Step:
        decodes = len(self._decoding)
        kv_tokens = self._kv_tokens + decodes * (steps - 1) // 2
        if not self._has_prefill:
            return Step(taken_s / steps, 0, 0, decodes, kv_tokens, steps)
        lasted_s = max(0.0, taken_s - self._loads_s)
        return Step(lasted_s, self._chunk_tokens, self._chunk_pairs, decodes, kv_tokens)

    def take_steps(self) -> tuple[Step, ...]:
        """Return the steps since the last call, as a live engine would tell of them."""
        taken, self._taken = tuple(self._taken), []
        return taken

    # --- Steps --------------------------------------------------------------------------------

    def _start(self, now_s: float) -> None:
        decoding = self._decoding
        preempted = False
        self._now_s = now_s
        while decoding and not (
            # If idle KV is dropped anyway, room is made for a block each; else for a token.
            self._make_room(len(decoding) * self._block_tokens) or self._make_room(len(decoding))
        ):
            if self._pins:
                self.unpin(next(reversed(self._pins)))
                continue
            self._preempt()
            preempted = True
        if self._waiting and not preempted:
            self._admit()
        costs, sequences = self.costs, len(decoding)
        first_s = (
            costs.step_s + costs.per_sequence_s * sequences + costs.per_kv_token_s * self._kv_tokens
        )
        self._began_s = now_s
        if self._prefilling:
            added_s, loads_s, begun = self._chunks(costs.batched_tokens - sequences)
            if sequences:
                taken_s = first_s + costs.prefill_share * added_s
            elif begun:
                # The constant is that of a whole prompt: it counts once for each, however many
                # steps that takes.
                taken_s = begun * costs.prefill_s + added_s
            else:
                # No step takes less than one of nothing.
                taken_s = max(costs.step_s, added_s)
            taken_s += loads_s
            self._loads_s = loads_s
            self._steps, self._has_prefill = 1, True
        elif sequences:
            finishes = self._finishes
            while finishes[0][2].number != finishes[0][1]:
                heappop(finishes)
            # At least one fits: there was room for it.
            fitting = (costs.capacity_tokens - self.active_tokens - self.idle_tokens) // sequences
            steps = min(finishes[0][0] - self._step, fitting)
            self._steps, self._has_prefill = steps, False
            self._first_step_s = first_s
            taken_s = steps * (first_s + costs.per_kv_token_s * sequences * (steps - 1) / 2)
        else:
            return
        self._under_way = True
        self._version += 1
        self._schedule(now_s + taken_s, self, self._version)

    def _cut(self, now_s: float) -> None:
        """End the steps under way with the one that runs now."""
        elapsed_s = now_s - self._began_s
        half_growth_s = self.costs.per_kv_token_s * len(self._decoding) / 2
        linear_s = self._first_step_s - half_growth_s
        if half_growth_s > 0:
            root = math.sqrt(linear_s * linear_s + 4 * half_growth_s * elapsed_s)
            # Citardauq's form: stable where the growth is small.
            passed = 2 * elapsed_s / (linear_s + root)
        else:
            passed = elapsed_s / linear_s
        steps = math.ceil(passed - _EPSILON_STEPS)
        if steps >= self._steps:
            return
        self._steps = steps
        self._version += 1
        ends_s = self._began_s + steps * (linear_s + half_growth_s * steps)
        self._schedule(max(now_s, ends_s), self, self._version)

    def _chunks(self, room_tokens: int) -> tuple[float, float, int]:
        """Put prefills into the step; returns seconds of their tokens and of loads, and how many
        begin.
        """
        costs, prefilling = self.costs, self._prefilling
        added_s = loads_s = 0.0
        begun = 0
        self._chunk_tokens = self._chunk_pairs = 0
        # A batch of decodes as large as the step leaves one token, so that prefills go on.
        room_tokens = max(1, room_tokens)
        while prefilling and room_tokens > 0:
            work = prefilling[0]
            if not work.begun:
                work.begun = True
                begun += 1
                if work.shared:
                    self._find_shared(work)
                added_s += costs.per_cached_token_s * work.past_tokens
                loads_s += work.load_s
            chunk = min(work.left_tokens, room_tokens)
            pairs = chunk * (chunk + 2 * work.past_tokens)
            added_s += costs.per_token_s * chunk + costs.per_pair_s * pairs
            self.computed_tokens += chunk
            self._chunk_tokens += chunk
            self._chunk_pairs += pairs
            work.past_tokens += chunk
            work.left_tokens -= chunk
            room_tokens -= chunk
            if work.shared:
                self._shared.computed(work.shared, work.past_tokens)
            if work.left_tokens:
                break
            self._completing.append(prefilling.popleft())
        return added_s, loads_s, begun

    def _prefilled(self, work: EngineTurn, now_s: float) -> None:
        if work.first_token_s < 0:
            work.first_token_s = now_s
            self._tells(work, now_s)
        work.made_tokens += 1
        if work.made_tokens >= work.output_tokens:
            self._end(work, now_s)
            return
        work.finish_step = self._step + work.output_tokens - work.made_tokens
        self._admitted += 1
        work.number = self._admitted
        heappush(self._finishes, (work.finish_step, work.number, work))
        self._decoding[work] = None
        self._kv_tokens += work.prompt_tokens + work.made_tokens

    def _end(self, work: EngineTurn, now_s: float) -> None:
        tokens = work.prompt_tokens + work.made_tokens - work.shared_tokens
        self.active_tokens -= tokens
        if self._keeps:
            self.idle_tokens += tokens - self._idle.pop(work.conversation, 0)
            self._idle[work.conversation] = tokens
            self._shared.begin(work.conversation, work.shared)
        self._leave(work.shared)
        self._finished(work, self, now_s)

    # --- KV -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        waiting, block = self._waiting, self._block_tokens
        room = self._max_sequences - len(self._decoding) - len(self._prefilling)
        while waiting and room > 0:
            work = waiting[0]
            tokens = work.prompt_tokens + work.made_tokens
            own_tokens = tokens - work.shared_tokens
            pinned_until_s = self._pins.pop(work.conversation, None)
            found = min(self.holds(work.conversation), work.reusable_tokens) // block * block
            kept = self._idle.pop(work.conversation, 0)
            self.idle_tokens -= kept
            self._take(work.shared)
            # Room is needed for the token that comes of it, and for those that decodes add.
            while not self._make_room(own_tokens + 1 + len(self._decoding)):
                if self._pins and not self._decoding and not self._prefilling:
                    # Nothing else would ever end, and make room.
                    self.unpin(next(reversed(self._pins)))
                    continue
                if kept:
                    self._idle[work.conversation] = kept
                    self.idle_tokens += kept
                self._leave(work.shared)
                if pinned_until_s is not None:
                    self._pins[work.conversation] = pinned_until_s
                return
            waiting.popleft()
            self.active_tokens += own_tokens + 1
            if pinned_until_s is not None:
                self._leave(self._shared.begins(work.conversation))
            if work.admitted_s < 0:
                work.admitted_s = self._now_s
                work.cached_tokens = found
            # The last token is computed in any case: the first token of output comes of it.
            work.past_tokens = min(max(found, work.loaded_tokens), tokens - 1)
            work.left_tokens = tokens - work.past_tokens
            work.begun = False
            self._prefilling.append(work)
            room -= 1

    def _find_shared(self, work: EngineTurn) -> None:
        """Look, as a prefill begins, for what others have computed of it by now."""
        found = self._shared.found(work.shared)
        spared = min(found - work.past_tokens, work.left_tokens - 1)
        if spared > 0:
            work.past_tokens += spared
            work.left_tokens -= spared
        if not work.preempted:
            work.cached_tokens = max(work.cached_tokens, found)
            self.shared_found_tokens += max(0, spared)

    def _take(self, prefix: tuple[SharedPrefix, ...]) -> None:
        if prefix:
            woken, new = self._shared.take(prefix)
            self.idle_tokens -= woken
            self.active_tokens += woken + new

    def _leave(self, prefix: tuple[SharedPrefix, ...]) -> None:
        if prefix:
            idle, gone = self._shared.leave(prefix)
            self.active_tokens -= idle + gone
            self.idle_tokens += idle

    def _make_room(self, tokens: int) -> bool:
        """Drop idle KV, the longest unused first, until this many tokens fit."""
        for conversation in [one for one, until_s in self._pins.items() if until_s <= self._now_s]:
            self.unpin(conversation)
        pinned_tokens = sum(self._idle.get(one, 0) for one in self._pins)
        room = self.costs.capacity_tokens - self.active_tokens
        if room - pinned_tokens < tokens:
            return False
        excess = tokens - room + self.idle_tokens
        while excess > 0:
            longest_unused = next(one for one in self._idle if one not in self._pins)
            held = self._idle[longest_unused]
            # The ends of histories go first, as vLLM frees blocks.
            dropped = min(held, excess)
            if dropped == held:
                del self._idle[longest_unused]
            else:
                self._idle[longest_unused] = held - dropped
            if isinstance(longest_unused, Stretch):
                self._shared.drop(longest_unused, dropped)
            elif dropped == held:
                self._shared.forget(longest_unused)
            self.idle_tokens -= dropped
            self.evicted_tokens += dropped
            excess -= dropped
        return True

    def _preempt(self) -> None:
        """Put the turn that goes last back into the queue.

        What was computed of it stays cached, as other turns' blocks do, until its room is needed.
        """
        self.preemptions += 1
        work = max((*self._prefilling, *self._decoding), key=_rank)
        if work.number < 0:
            self._prefilling.remove(work)
            tokens = work.prompt_tokens + work.made_tokens + 1
            computed = work.past_tokens
        else:
            del self._decoding[work]
            work.made_tokens = work.output_tokens - (work.finish_step - self._step)
            work.number = -1
            tokens = work.prompt_tokens + work.made_tokens
            # Of the newest token there is no KV yet.
            computed = tokens - 1
            self._kv_tokens -= tokens
        self.active_tokens -= tokens - work.shared_tokens
        work.preempted = True
        work.loaded_tokens = 0
        work.load_s = 0.0
        if self._keeps and computed:
            work.reusable_tokens = computed
        if self._keeps and computed > work.shared_tokens:
            self._idle[work.conversation] = computed - work.shared_tokens
            self.idle_tokens += computed - work.shared_tokens
            self._shared.begin(work.conversation, work.shared)
        self._leave(work.shared)
        self._wait(work)

    def _wait(self, work: EngineTurn) -> None:
        if not self._waiting or _rank(self._waiting[-1]) < _rank(work):
            self._waiting.append(work)
        else:
            insort(self._waiting, work, key=_rank)


def _rank(work: EngineTurn) -> tuple[float, int]:
    return work.priority, work.came
