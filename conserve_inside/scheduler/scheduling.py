"""vLLM's two schedulers, made to know conversations.

vLLM decides as before what a step can hold. Through what it looks at anyway it is told in which
order to look at calls (priorities), how long their chunks may be, and which to preempt. Answers do
not depend on it: which tokens are computed together does not change them.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from conserve.wire import EngineTold, StageTimes
from conserve_inside.lane.scheduler_lane import SchedulerLane
from conserve_inside.policy import (
    Background,
    ChunkController,
    FeedbackQueue,
    PrefillLane,
    Retention,
    kind_of,
)
from conserve_inside.scheduler.commands import offer_commands
from conserve_inside.scheduler.histories import Histories
from conserve_inside.scheduler.turns import Counts, Parts, Turn, Waits, turn_of
from deployments.upstream.seams import require_seams

# Levels change more slowly than that, and sorting a queue of thousands in every step takes long.
_RANKS_EVERY_S = 0.05
# Beyond a block, a usual append.
_APPEND_TOKENS = 128
# Above any number of blocks.
_LEVEL = 1 << 32


class ConversationScheduler(Scheduler):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Schedules one step at a time, as on CPUs.

    Settings are ``additional_config["conserve"]``: ``feedback``, ``background``, ``chunks``,
    ``retention`` and ``lane`` have arguments of `FeedbackQueue`, `Background`, `ChunkController`,
    `Retention` and `PrefillLane`; ``stages`` has the shares of `SchedulerLane`. ``mechanisms``
    names those of chunks, order and retention that are in use (unset: all); without order all calls
    are interactive, and of one level.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_seams("scheduler")
        super().__init__(*args, **kwargs)
        if self.policy != SchedulingPolicy.PRIORITY:
            raise ValueError("scheduling_policy: set it to priority, by which calls are ordered")
        given = (self.vllm_config.additional_config or {}).get("conserve", {})
        self._block_tokens = int(self.block_size)
        capacity_tokens = self.cache_config.num_gpu_blocks * self._block_tokens
        mechanisms = given.get("mechanisms", ("chunks", "order", "retention"))
        levels = {} if "order" in mechanisms else {"levels": 1}
        self.queue = FeedbackQueue(capacity_tokens, **given.get("feedback", {}) | levels)
        self.background = Background(**given.get("background", {}))
        self._bounds_steps = "chunks" in mechanisms
        keeps = {} if "retention" in mechanisms else {"hold_s": 0.0, "longest_s": 0.0}
        most = int(self.max_num_scheduled_tokens)
        least = min(most, self._block_tokens + _APPEND_TOKENS)
        bounds = {"least_tokens": least, "most_tokens": most}
        self.chunks = ChunkController(**{**bounds, **given.get("chunks", {})})
        manager, retention = self.kv_cache_manager, Retention(**given.get("retention", {}) | keeps)
        self.histories = Histories(manager, int(self.hash_block_size), retention)
        self.parts = Parts(self, self._block_tokens)
        # Held calls are behind all levels. Where there is one level, none is held.
        self.counts = Counts(self.queue.levels + (self.queue.levels > 1))
        self.clock: Callable[[], float] = time.monotonic
        self.turns: dict[str, Turn] = {}
        self._waits = Waits(self.turns)
        # With several kinds of layers blocks cannot be counted so simply. Some kinds' states have
        # to end where vLLM says, so their chunks are not cut.
        groups = len(self.kv_cache_config.kv_cache_groups)
        self._counts_blocks = groups == 1 and not self.is_encoder_decoder
        self._cuts = not self.need_mamba_block_aligned_split
        # A chunk of no more tokens than this is a decode's.
        self._decode_tokens = 1 + int(self.num_spec_tokens)
        self.lane: SchedulerLane | None = None
        # Tokens given to the lane in this step, which vLLM counts as found by the connector.
        self.passed_over_tokens = 0
        if hasattr(self.connector, "lane"):
            lane = PrefillLane(**given.get("lane", {}))
            self.lane = SchedulerLane(self, lane, given.get("stages"))
            self.connector.lane = self.lane
        self._rank_at_s = 0.0
        self._limit: int | None = None
        self._left = 0
        # Background calls that may yet decode in this step, and the calls of the last one.
        self._left_decodes = 0
        self._ran: Collection[str] = ()
        # Tokens left to requests that wait on a better level than a running one, by its level.
        self._left_to_waiting: list[int] = []
        self.decoding = False
        # Steps in flight: when each began, prefill tokens, decodes, and SMs.
        self._steps: dict[int, tuple[float, int, int, int]] = {}
        self._updated_s = 0.0
        manager.allocate_slots = self._giving_way(manager.allocate_slots)

    # --- a step ------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now_s = self.clock()
        self.histories.expire(now_s)
        self.parts.new_step()
        self._waits.new_step()
        classes, held = {turn.background for turn in self.turns.values()}, self.background.holds
        # If that left a step empty, interactive calls load, or lack room that the others have.
        can_run = False in classes and not (held and not self._ran)
        self.background.look(can_run, True in classes, now_s)
        if self.background.holds != held:
            self._rank_at_s = now_s
        waits = bool(self.waiting or self.kv_holding_waiting)
        ranks = waits and now_s >= self._rank_at_s
        if ranks:
            self._rank(now_s)
            self._rank_at_s = now_s + _RANKS_EVERY_S
        self._set_limit(waits, now_s)
        output = super().schedule(throttle_prefills)
        if ranks:
            self._waits.look(self, (*self.waiting._heap, *self.kv_holding_waiting._heap), now_s)
        if self.passed_over_tokens:
            self.connector_prefix_cache_stats.hits -= self.passed_over_tokens
            self.passed_over_tokens = 0
        self._note(output, now_s)
        self._ran = output.num_scheduled_tokens.keys()
        return output

    def is_held(self, request: Any) -> bool:
        """Return whether a call that does not decode waits for interactive ones."""
        return self.background.holds and self.turns[request.request_id].background

    def left_tokens(self) -> int:
        """Return the step's tokens that are left for the lane: at least a block, so it goes on."""
        most = int(self.max_num_scheduled_tokens)
        return max(self._block_tokens, most if self._limit is None else self._left)

    def lane_served(self, request_id: str, tokens: int) -> None:
        """Charge a request's history for what the lane has computed."""
        turn = self.turns.get(request_id)
        assert self.lane is not None
        start = self.lane.start_of(request_id)
        if turn is None or start is None:
            return
        self.queue.serve(turn.key, tokens, 0, self.clock())
        turn.charged_tokens = max(turn.charged_tokens, start) + tokens

    def _set_limit(self, waits: bool, now_s: float) -> None:
        running = self.running
        prefills = [one for one in running if one.is_prefill_chunk and not self.is_held(one)]
        decodes = [one.request_id for one in running if not one.is_prefill_chunk]
        behind = sum(self.turns[name].background for name in decodes)
        interactive, wanted = len(decodes) - behind, bool(prefills or waits)
        self._left_decodes, most = self.background.share(interactive, behind, wanted)
        self.decoding = interactive + self._left_decodes > 0
        if prefills or self._left_decodes < behind:
            # Decodes go first, so that a full step leaves none of them out. Then by level.
            running.sort(key=lambda one: self._rank_running(one, now_s))
        if self.decoding and self._bounds_steps:
            most = min(most, self.chunks.allowed_tokens())
        if not self._cuts or not wanted or not (waits or self.decoding or most < math.inf):
            self._limit = None
            return
        self._limit = self._left = int(min(most, self.max_num_scheduled_tokens))
        self._left_to_waiting = [0] * (len(self.counts.preempted) + 1)
        if prefills and waits and len(running) < self.max_num_active_reqs:
            self._leave_to_waiting()

    def _rank_running(self, request: Any, now_s: float) -> tuple[int, float]:
        if not request.is_prefill_chunk:
            # Those of the background are behind the others, and take turns.
            is_behind = self.turns[request.request_id].background
            return -1, is_behind * (1 + (request.request_id in self._ran))
        return self.level(request, now_s), request.arrival_time

    def _leave_to_waiting(self) -> None:
        """Set how much of the step is left to requests that wait on a better level, by level."""
        wanted = self._left_to_waiting
        for queue in (self.waiting, self.kv_holding_waiting):
            for request in queue._heap:
                if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    missing_tokens = self.turns[request.request_id].missing_tokens
                    wanted[request.priority + 1] += missing_tokens
        for level in range(1, len(wanted)):
            wanted[level] += wanted[level - 1]

    def _note(self, output: Any, now_s: float) -> None:
        began: set[str] = {one.req_id for one in output.scheduled_new_reqs}
        began.update(output.scheduled_cached_reqs.resumed_req_ids)
        prefill_tokens = decodes = 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            if tokens <= self._decode_tokens and request_id not in began:
                decodes += 1
                continue
            request, turn = self.requests[request_id], self.turns[request_id]
            done = request.num_computed_tokens
            if request_id in began:
                found_tokens = done - tokens
                if self.lane is not None:
                    from_lane = self.lane.start_of(request_id)
                    found_tokens = found_tokens if from_lane is None else from_lane
                    self.lane.runs(request_id)
                self._begins(request, turn, found_tokens, now_s)
            prefill_tokens += tokens
            # What is computed again is not charged again.
            new = done - max(turn.charged_tokens, done - tokens)
            if new > 0:
                self.queue.serve(turn.key, new, 0, now_s)
                turn.charged_tokens = done
        if output.num_scheduled_tokens:
            decode_sms = 0 if self.lane is None else self.lane.decode_sms
            self._steps[id(output)] = (now_s, prefill_tokens, decodes, decode_sms)

    def _begins(self, request: Any, turn: Turn, found_tokens: int, now_s: float) -> None:
        turn.runs = True
        turn.waited_s += max(0.0, now_s - turn.since_s)
        if turn.is_known:
            self.histories.runs(turn)
        if request.num_preemptions == 0:
            missing = request.num_tokens - found_tokens
            turn.kind = kind_of(False, found_tokens, missing, self.chunks.budget_tokens)
            self.counts.begun[turn.kind] += 1

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now_s = self.clock()
        began_s, prefill_tokens, decodes, decode_sms = self._steps.pop(
            id(scheduler_output), (now_s, 0, 0, 0)
        )
        if self.lane is not None:
            prefill_tokens += self.lane.spent_tokens(model_runner_output)
        if decodes and not (self.lane is not None and self.lane.slows_steps):
            # With two in flight the second begins when the first has ended.
            lasted_s = now_s - max(began_s, self._updated_s)
            self.chunks.step(lasted_s, prefill_tokens, now_s, decodes)
            self.background.learn(lasted_s, decodes, prefill_tokens)
            if self.lane is not None:
                self.lane.stepped(lasted_s, decode_sms, now_s)
        self._updated_s = now_s
        return super().update_from_output(scheduler_output, model_runner_output)

    # --- order -------------------------------------------------------------------------------

    def level(self, request: Any, now_s: float) -> int:
        """Return a call's level now; level 0 goes first."""
        turn = self.turns[request.request_id]
        if self.is_held(request):
            return self.queue.levels
        waited_s = 0.0 if request.status == RequestStatus.RUNNING else now_s - turn.since_s
        if self.lane is not None and self.lane.start_of(request.request_id) is not None:
            # It has its blocks, and needs only a place: no other call gains if it waits.
            return 0
        return self.queue.level(turn.key, request.num_tokens, waited_s, now_s, last=turn.background)

    def _rank(self, now_s: float) -> None:
        for queue in (self.waiting, self.kv_holding_waiting):
            requests = list(queue._heap)
            levels = [self.level(one, now_s) for one in requests]
            if all(one.priority == level for one, level in zip(requests, levels, strict=True)):
                continue
            # A heap does not notice that what is in it changes.
            queue.remove_requests(requests)
            for request, level in zip(requests, levels, strict=True):
                request.priority = level
                queue.add_request(request)

    def _rank_victims(self) -> None:
        """Have vLLM, which preempts the highest priority, preempt the last level's largest."""
        now_s = self.clock()
        for request in self.running:
            blocks = -(-request.num_computed_tokens // self._block_tokens)
            self._charge_decodes(request, now_s)
            request.priority = self.level(request, now_s) * _LEVEL + blocks

    def _charge_decodes(self, request: Any, now_s: float) -> None:
        turn = self.turns[request.request_id]
        new = request.num_computed_tokens - turn.charged_tokens
        if not request.is_prefill_chunk and new > 0 and turn.charged_tokens:
            self.queue.serve(turn.key, 0, new, now_s)
            turn.charged_tokens = request.num_computed_tokens

    def add_request(self, request: Any) -> None:
        now_s = self.clock()
        if request.request_id not in self.requests:
            turn = self.turns[request.request_id] = turn_of(request, now_s)
            turn.missing_tokens = request.num_tokens
            turn.background &= self.queue.levels > 1
            if turn.is_known:
                self.histories.comes(turn, now_s)
                found_tokens = self.histories.cached_tokens(turn.key)
                turn.missing_tokens = max(1, request.num_tokens - found_tokens)
            # It replaces what its client gave.
            request.priority = self.level(request, now_s)
        super().add_request(request)

    def _preempt_request(
        self, request: Any, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        now_s, turn = self.clock(), self.turns[request.request_id]
        self._charge_decodes(request, now_s)
        level = self.level(request, now_s)
        self.counts.preempted[level] += 1
        turn.since_s, turn.runs, turn.missing_tokens = now_s, False, request.num_tokens
        # The queue of waiting requests compares levels.
        request.priority = level
        if turn.is_known:
            self.histories.waits_again(turn)
        super()._preempt_request(request, timestamp, drop_stale_output)

    # --- chunks ------------------------------------------------------------------------------

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how long a chunk may be; vLLM asks before it looks for room for it."""
        tokens = int(
            super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        )
        if self.turns[request.request_id].background and not self._may_run(request):
            return 0
        if tokens <= self._decode_tokens:
            return tokens
        if self._limit is not None and not request.has_encoder_inputs:
            tokens = self._limited(request, num_computed_tokens, tokens)
        if tokens and self._counts_blocks and self._cuts and not request.has_encoder_inputs:
            before = self.parts.current
            tokens = self.parts.fitting(
                request, num_computed_tokens, tokens, self.histories.keeps_any
            )
            self.counts.parts += self.parts.current not in (None, before)
        if self._limit is not None:
            self._left = max(0, self._left - tokens)
        return tokens

    def _may_run(self, request: Any) -> bool:
        """Return whether a background call has a part of this step."""
        if request.status != RequestStatus.RUNNING or request.is_prefill_chunk:
            return not self.background.holds
        self._left_decodes -= 1
        return self._left_decodes >= 0

    def _limited(self, request: Any, start: int, tokens: int) -> int:
        limit = self._left
        if request.status == RequestStatus.RUNNING:
            level = self.level(request, self.clock())
            left_to_others = self._left_to_waiting[level]
            # A block at least, so that it goes on.
            limit = min(limit, max(self._block_tokens, self._left - left_to_others))
        if tokens <= limit:
            return tokens
        if limit < self._block_tokens and self._left < (self._limit or 0):
            # Others have had their chunks, and a part of a block is not worth a step's overhead.
            allowed = 0
        else:
            allowed = self.parts.whole_blocks(start, tokens, limit)
        if self.decoding:
            self.chunks.was_cut()
            self.counts.cut[self.turns[request.request_id].kind] += 1
        return allowed

    # --- room --------------------------------------------------------------------------------

    def _giving_way(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        """Give up kept blocks where there is no room, before a request is preempted."""

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
            if request.request_id == self.parts.current:
                options["full_sequence_must_fit"] = False
            blocks = allocate(request, num_new_tokens, *args, **options)
            if blocks is not None:
                return blocks
            runs = request.status == RequestStatus.RUNNING
            if runs or self._would_fit(request):
                own, now_s, count = self.turns[request.request_id].key, self.clock(), 1
                while blocks is None and self.histories.give_up(count, now_s, but=own):
                    # Just enough, found in few steps.
                    count *= 2
                    blocks = allocate(request, num_new_tokens, *args, **options)
            if blocks is None and runs:
                self._rank_victims()
            elif blocks is None:
                self._waits.no_room()
            return blocks

        return allocate_slots

    def _would_fit(self, request: Any) -> bool:
        """Return whether a waiting call would find room if nothing were kept."""
        if not self.histories.keeps_any:
            return False
        if not self._counts_blocks or request.request_id == self.parts.current:
            return True
        hits = self.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
        used = sum(int(block.ref_cnt > 0) for block in hits)
        need = -(-request.num_tokens // self._block_tokens) - used
        return bool(need <= self.histories.free_without_kept())

    # --- ends --------------------------------------------------------------------------------

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        """Add to the answer what of its history stays, and what the turn waited for."""
        now_s, turn = self.clock(), self.turns[request.request_id]
        if not turn.runs:
            turn.waited_s += max(0.0, now_s - turn.since_s)
        times = StageTimes() if self.lane is None else self.lane.over(request.request_id)
        params, encoder_params = super()._free_request(request, delay_free_blocks)
        if turn.is_known:
            cached_tokens = self.histories.cached_tokens(turn.key)
            kept_s = self.histories.kept_for_s(turn.key, now_s)
            told = EngineTold(turn.waited_s, turn.waited_for, cached_tokens, kept_s, times)
            params = {**(params or {}), **told.params()}
        return params, encoder_params

    def _free_blocks(self, request: Any) -> None:
        now_s, turn = self.clock(), self.turns[request.request_id]
        self._charge_decodes(request, now_s)
        if turn.is_known:
            level = self.queue.level(turn.key, request.num_tokens, 0.0, now_s)
            self.histories.ends(turn, request, level, now_s)
        else:
            self.queue.forget(turn.key)
        super()._free_blocks(request)
        del self.turns[request.request_id]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Free what is kept first, since kept blocks would make vLLM refuse."""
        self.histories.release_all()
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))


class AsyncConversationScheduler(ConversationScheduler, AsyncScheduler):  # type: ignore[misc]
    """Schedules the next step while one runs, as on GPUs."""


def conversation_scheduler(*args: Any, **kwargs: Any) -> ConversationScheduler:
    """Make vLLM's ``scheduler_cls``, which depends on its configuration."""
    offer_commands()
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (AsyncConversationScheduler if asynchronous else ConversationScheduler)(*args, **kwargs)
