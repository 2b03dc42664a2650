"""An engine's load, which it tells the table with each beat: `EngineLoad`.

What waits and what decodes is read, once a beat, from the state that vLLM keeps of each request
for its answers. How long iterations take, and how fast prompts are computed, vLLM tells its
loggers of statistics once an iteration. Nothing is done once a token.

How far a prompt has come, and what of it caches had, vLLM's core tells with the first token. Until
then a prompt counts whole, but for what its turn expects in caches: the history that this engine
holds, or all of it where a prefiller has just computed it.

Internals of vLLM 0.29 that are used: ``AsyncLLM.output_processor.request_states``, and
``logger_manager.stat_loggers`` (an ``AsyncLLM`` takes no logger later on, and Ray Serve LLM gives
it none of ours).
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from vllm.v1.metrics.loggers import StatLoggerBase

from conserve.placement.load import EngineLoad

# Of late.
WINDOW_S = 30
# Of prompts with fewer tokens to compute, what is measured is what any iteration costs.
_LEAST_PREFILL_TOKENS = 128
# Of a prompt: all of it.
ALL_TOKENS = 2**63


class RequestState(Protocol):
    """What vLLM knows of a request that is under way."""

    external_req_id: str
    is_prefilling: bool
    prompt_len: int


class Lately:
    """The mean of what was seen within `WINDOW_S`, kept by the second.

    Example:
        >>> steps = Lately()
        >>> steps.add(0.02, 1, now_s=100.0)
        >>> steps.add(0.04, 1, now_s=101.5)
        >>> round(steps.mean(now_s=110.0), 3), steps.mean(now_s=130.0), steps.mean(now_s=200.0)
        (0.03, 0.04, 0.0)
    """

    def __init__(self) -> None:
        # Each second's total and weight.
        self._seconds: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_S)

    def add(self, total: float, weight: float, now_s: float) -> None:
        """So much more, which counts for so much."""
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            _, total_before, weight_before = self._seconds.pop()
            total, weight = total_before + total, weight_before + weight
        self._seconds.append((second, total, weight))

    def mean(self, now_s: float) -> float:
        """The total over the weight; 0 if nothing was seen."""
        recent = [one for one in self._seconds if one[0] > now_s - WINDOW_S]
        weight = sum(one[2] for one in recent)
        return sum(one[1] for one in recent) / weight if weight else 0.0


class LoadMeter:
    """One engine's load. Times are of the monotonic clock.

    Args:
        requests: those under way, by any id; kept up to date by whoever has them.
    """

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self._expected: dict[str, int] = {}
        self._steps = Lately()
        self._prefills = Lately()
        self._prefilled_until_s = 0.0

    def load(self, now_s: float) -> EngineLoad:
        """The load now."""
        # Several choices have one prompt.
        prompts: dict[str, int] = {}
        decodes = 0
        for request in self._requests.values():
            if not request.is_prefilling:
                decodes += 1
                continue
            expected = self._expected.get(request.external_req_id, 0)
            prompts[request.external_req_id] = max(0, request.prompt_len - expected)
        return EngineLoad(
            sum(prompts.values()), decodes, self._steps.mean(now_s), self._prefills.mean(now_s)
        )

    @asynccontextmanager
    async def expecting(self, request_id: str, tokens: int) -> AsyncIterator[None]:
        """A request is under way of whose prompt caches should have so many tokens."""
        self._expected[request_id] = tokens
        try:
            yield
        finally:
            self._expected.pop(request_id, None)

    def iteration(
        self,
        now_s: float,
        *,
        gaps_s: Sequence[float],
        waits_s: Sequence[float],
        computed_tokens: int,
        ended: int,
        running: int,
    ) -> None:
        """Note an iteration that put something out.

        Args:
            gaps_s: for each request that decoded, how long ago its token before this one came.
            waits_s: for each request that has come to its first token, how long that took.
            computed_tokens: of those requests' prompts, what was in no cache.
            ended: how many requests end with it.
            running: how many go on after it.
        """
        if waits_s:
            if computed_tokens >= _LEAST_PREFILL_TOKENS:
                # Prompts that overlap share their time.
                since_s = max(now_s - max(waits_s), self._prefilled_until_s)
                self._prefills.add(computed_tokens, max(0.0, now_s - since_s), now_s)
                self._prefilled_until_s = now_s
        elif gaps_s and len(gaps_s) >= running + ended:
            # Whoever runs has put out a token: nobody's prompt was computed in part. Who was
            # preempted has a longer gap than the iteration took.
            self._steps.add(min(gaps_s), 1, now_s)


def measure(client: Any) -> LoadMeter:
    """Meter an ``AsyncLLM``. Without vLLM's statistics (``disable_log_stats``) no time is known."""
    meter = LoadMeter(client.output_processor.request_states)
    if client.logger_manager is not None:
        client.logger_manager.stat_loggers.append(_Iterations(meter))
    return meter


class _Iterations(StatLoggerBase):  # type: ignore[misc]  # vLLM's types are not looked at.
    def __init__(self, meter: LoadMeter) -> None:
        self._meter = meter

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None or iteration_stats is None:
            return
        self._meter.iteration(
            time.monotonic(),
            gaps_s=iteration_stats.inter_token_latencies_iter,
            waits_s=iteration_stats.time_to_first_tokens_iter,
            computed_tokens=iteration_stats.prompt_token_stats.computed,
            ended=len(iteration_stats.finished_requests),
            running=scheduler_stats.num_running_reqs,
        )

    def log_engine_initialized(self) -> None:
        pass
