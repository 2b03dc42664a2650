"""The lane as the scheduler has it: which call goes there, and what becomes of it."""

from typing import Any

from conserve.engine_scheduling import DecodeReserve, PrefillLane
from conserve.engine_scheduling.calls import Route
from deployments.engine.lane.fits import fits
from deployments.engine.lane.notes import Job, LaneNotes, LaneReport

# Of a chunk on a GPU, beside whatever a step computes: activations of both are there at once.
_GPU_CHUNK_TOKENS = 512


class SchedulerLane:
    """Is the scheduler's half of the lane of one engine.

    Args:
        scheduler: the one that asks (`ConversationScheduling`).
        policy: says what goes to the lane.

    Attributes:
        reserve: says how many SMs decodes have beside it; one that decides nothing until the worker
            has said that there are any.
        decode_sms: what they have in the next step.
    """

    def __init__(self, scheduler: Any, policy: PrefillLane) -> None:
        self._scheduler = scheduler
        self.policy = policy
        config = scheduler.vllm_config
        self._alternates = config.device_config.device_type == "cpu"
        self._new: list[Job] = []
        # From which token on they were the lane's, until their next step.
        self._starts: dict[str, int] = {}
        self._failed: set[str] = set()
        self._late_s = float(scheduler.chunks.late_s)
        self.reserve = DecodeReserve((), late_s=self._late_s)
        self.decode_sms = 0
        self._current_since_s = 0.0

    # --- the connector asks -------------------------------------------------------------------

    def route(self, request: Any, found_tokens: int) -> Route:
        """Return where a request that could begin now is prefilled."""
        name = request.request_id
        if name in self._failed or not fits(request):
            # Nothing of a failed one was right, or it would not be asked after.
            self._starts.pop(name, None)
            return "inline"
        scheduler = self._scheduler
        route = self.policy.route(
            name,
            request.num_tokens - found_tokens,
            scheduler.chunks.allowed_tokens(),
            scheduler.decodes,
            scheduler.clock(),
        )
        if route != "inline":
            # That is what the budget does to it.
            scheduler.chunks.was_cut()
        return route

    def takes(self, request: Any, found_tokens: int, tokens: int, block_ids: list[int]) -> None:
        """A request has its blocks, and goes to the lane."""
        name = request.request_id
        self.policy.takes(name, tokens)
        self._current_since_s = self._scheduler.clock()
        self._starts[name] = found_tokens
        end = found_tokens + tokens
        ids = list(request.all_token_ids[:end])
        self._new.append(Job(name, ids, list(block_ids), found_tokens, end))
        if request.prefill_stats is not None:
            # It is computed here: to whoever counts what caches had, it is no hit.
            request.prefill_stats.set(request.num_prompt_tokens, found_tokens, 0)
        self._scheduler.passed_over_tokens += tokens

    def notes(self, computes: bool) -> LaneNotes:
        """For the worker, with a step.

        Args:
            computes: whether the step does anything: decode, or prefill what is short.
        """
        scheduler = self._scheduler
        jobs, self._new = tuple(self._new), []
        most = int(scheduler.max_num_scheduled_tokens)
        chunk = scheduler.left_tokens() if self._alternates else _GPU_CHUNK_TOKENS
        return LaneNotes(jobs, min(most, chunk), self._decide(computes))

    def _decide(self, computes: bool) -> int | None:
        if not self.reserve.sizes_sms:
            return None
        now_s = self._scheduler.clock()
        waited_s = None if self.policy.current is None else now_s - self._current_since_s
        self.decode_sms = self.reserve.decide(decodes=computes, waited_s=waited_s, now_s=now_s)
        return self.decode_sms

    def stepped(self, lasted_s: float, decode_sms: int, now_s: float) -> None:
        """A step with decodes is over, in which they had so many SMs."""
        if self.reserve.sizes_sms and decode_sms < self.reserve.sizes_sms[-1]:
            self.reserve.step(lasted_s, decode_sms, now_s)

    def hears(self, report: LaneReport | None, received: set[str]) -> None:
        """Note what the worker has done.

        Args:
            received: requests whose blocks are no more the lane's, nor LMCache's.
        """
        if report is not None:
            if report.sizes_sms:
                self.reserve = DecodeReserve(report.sizes_sms, late_s=self._late_s)
            self._failed |= report.failed
            for name, tokens in report.computed.items():
                self.policy.computed(name, tokens)
                self._scheduler.lane_served(name, tokens)
        current = self.policy.current
        if current is not None and current in received:
            cut = self._scheduler.requests[current].is_finished()
            failed = current in self._failed
            self.policy.ends(current, "failed" if failed else "cut" if cut else "done")
            if cut:
                self._forget(current)

    def spent_tokens(self, model_runner_output: Any) -> int:
        """How many tokens of the lane's a step's time was spent on, too; on a GPU none."""
        told = model_runner_output.kv_connector_output
        report = None if told is None else told.kv_connector_worker_meta
        if not self._alternates or not isinstance(report, LaneReport):
            return 0
        return sum(report.computed.values())

    def start_of(self, name: str) -> int | None:
        """From which token on a request was the lane's, if it was and has not run since."""
        return self._starts.get(name)

    def has_failed(self, name: str) -> bool:
        """Whether the lane could not compute a request's prompt."""
        return name in self._failed

    # --- the scheduler tells ------------------------------------------------------------------

    def runs(self, name: str) -> None:
        """A request has begun to run."""
        self.policy.forget(name)
        self._starts.pop(name, None)
        self._failed.discard(name)

    def over(self, name: str) -> None:
        """A request has ended. What of it is in the lane ends with its chunk."""
        self.policy.forget(name)
        if name != self.policy.current:
            self._forget(name)

    def observed(self) -> dict[str, Any]:
        """For `SchedulerLoad`."""
        policy = self.policy
        return {
            "lane_waiting": policy.waiting,
            "lane_running": int(policy.current is not None),
            "lane_tokens": policy.current_tokens,
            "lane_prefills": {"done": policy.done, "failed": policy.failed},
            "lane_computed_tokens": policy.computed_tokens,
            "decode_sms": self.decode_sms if self.reserve.sizes_sms else None,
        }

    def _forget(self, name: str) -> None:
        self._starts.pop(name, None)
        self._failed.discard(name)
