"""An engine with a lane: prefills that decodes are kept from run beside them, on SMs of their own
(AgentServe, section III)."""

from collections.abc import Callable

from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.conversations import ConversationScheduler
from benchmarks.simulate.inside.costs import Steps
from benchmarks.simulate.inside.engine import Engine
from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.scheduler import Scheduler, Step
from benchmarks.simulate.inside.sm_share import FedBackShare, FixedShare, bandwidth_of
from conserve.engine_scheduling import PrefillLane
from conserve.engine_scheduling.calls import Route

# Prefilled at a time: llama.cpp's micro-batch.
_CHUNK_TOKENS = 512
_REBIND_S = 50e-6


class LaneEngine(Engine):
    """An engine whose scheduler has decodes, and what may run beside them.

    All else is prefilled in the lane, one prompt after the other: what `PrefillLane` says, or with
    vLLM's scheduler every prompt. While both have work, decodes have the SMs that `sm_share` says,
    and the lane the others; else the one with work has all. The lane goes on at its new speed when
    that changes; steps of decodes end as they began. Each change costs the lane 50 us. What both
    take of each other's bandwidth is not modelled.

    Attributes:
        laned: calls that went through the lane.
    """

    def __init__(
        self,
        loop: Loop,
        scheduler: Scheduler,
        costs: Steps,
        ended: Callable[[Call], None],
        sm_share: FedBackShare | FixedShare,
    ) -> None:
        super().__init__(loop, scheduler, costs, ended)
        self._sm_share = sm_share
        self._policy = PrefillLane()
        self._waiting: list[Call] = []
        # The chunk that the lane computes: whose, how many tokens, how much is left of it (seconds,
        # with all SMs, as a share of them says), since when and how fast.
        self._call: Call | None = None
        self._tokens = 0
        self._left = 0.0
        self._since_s = 0.0
        self._lasts_s = 0.0
        self._lane_share = 1.0
        self._version = 0
        self.laned = 0

    def submit(self, call: Call) -> None:
        call.came_s = call.since_s = self._loop.now_s
        self._waiting.append(call)
        self._begin_those_who_may()

    def _begin_those_who_may(self) -> None:
        """Begin a waiting call in the lane, and those that need it no longer in steps."""
        for call in list(self._waiting):
            route = self._route(call)
            if route == "wait":
                continue
            self._waiting.remove(call)
            if route == "lane":
                self.laned += 1
                self._begin_prompt(call)
            else:
                self._policy.forget(call.key)
                self.scheduler.add(call, self._loop.now_s)
                self._wake()

    def _route(self, call: Call) -> Route:
        scheduler = self.scheduler
        if not isinstance(scheduler, ConversationScheduler):
            return "lane" if self._call is None else "wait"
        missing = call.prompt_tokens - scheduler.found_tokens(call)
        allowed = scheduler.controller.allowed_tokens()
        decoding = any(one.decodes for one in scheduler.running)
        route = self._policy.route(call.key, missing, allowed, decoding, self._loop.now_s)
        if route != "inline":
            # That is what the budget does to it.
            scheduler.controller.was_cut()
        return route

    # --- decodes -----------------------------------------------------------------------------

    def _step(self) -> None:
        now_s = self._loop.now_s
        self._begin_those_who_may()
        step = self.scheduler.schedule(now_s) or self.scheduler.schedule(now_s)
        self._runs = step is not None
        self._share_anew()
        if step is None:
            return
        share = self._decode_share()
        kv_tokens = sum(call.computed_tokens for call in step.decodes)
        chunks = [(tokens, call.computed_tokens) for call, tokens in step.chunks]
        took_s = self._costs.step_s(
            len(step.decodes), kv_tokens, chunks, share, bandwidth_of(share)
        )
        self._loop.at(now_s + took_s, self._shared, step, took_s, share)

    def _shared(self, step: Step, lasted_s: float, share: float) -> None:
        if step.decodes and share < 1:
            self._sm_share.step(lasted_s, share, self._loop.now_s)
        self._done(step, lasted_s, 1)

    def _decode_share(self) -> float:
        if self._call is None:
            return 1.0
        now_s = self._loop.now_s
        return self._sm_share.decide(now_s - self._call.came_s, now_s)

    # --- the lane ----------------------------------------------------------------------------

    def _begin_prompt(self, call: Call) -> None:
        self.scheduler.takes(call, self._loop.now_s)
        self._policy.takes(call.key, call.missing_tokens)
        self._call = call
        self._next_chunk()

    def _next_chunk(self) -> None:
        call = self._call
        assert call is not None
        self._tokens = min(_CHUNK_TOKENS, call.missing_tokens)
        self._left = 1.0
        self._begin_at(self._share())

    def _share(self) -> float:
        return 1.0 - self._decode_share() if self._runs else 1.0

    def _begin_at(self, share: float, after_s: float = 0.0) -> None:
        call = self._call
        assert call is not None
        self._lane_share, self._since_s = share, self._loop.now_s + after_s
        chunks = [(self._tokens, call.computed_tokens)]
        self._lasts_s = self._costs.step_s(0, 0, chunks, share, bandwidth_of(share))
        self._version += 1
        ends_s = self._since_s + self._left * self._lasts_s
        self._loop.at(ends_s, self._chunk_done, self._version)

    def _share_anew(self) -> None:
        if self._call is None or (share := self._share()) == self._lane_share:
            return
        passed_s = max(0.0, self._loop.now_s - self._since_s)
        self._left = max(0.0, self._left - passed_s / self._lasts_s)
        self._begin_at(share, _REBIND_S)

    def _chunk_done(self, version: int) -> None:
        if version != self._version:
            return
        call, now_s = self._call, self._loop.now_s
        assert call is not None
        call.computed_tokens += self._tokens
        self._policy.computed(call.key, self._tokens)
        if call.missing_tokens:
            self._next_chunk()
            return
        self._call = None
        self._policy.ends(call.key, "done")
        if self.scheduler.took(call, now_s):
            self._ended(call)
        self._wake()
        self._begin_those_who_may()
