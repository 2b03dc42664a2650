"""Tells the conversation table an engine's load with each beat, and the turns that it begins.

What waits and decodes is read once a beat from vLLM's state of requests, and iterations come from
the core (`step_meter`) through vLLM's loggers of statistics. Nothing is done once a token. Until
its first token a prompt counts whole, less what its turn expects in caches.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vllm.v1.metrics.loggers import StatLoggerBase

from conserve.clock import unix_s
from conserve.direct import Desk, Notice
from conserve.placement import EngineLoad, Step
from conserve.wire import BEAT_S, FAILED_IMAGES, OVERDUE, STEPS
from deployments.engine.step_meter import LEAST_PREFILL_TOKENS
from deployments.table_client import TableClient, TableUnavailable

# How long iterations count in the means.
WINDOW_S = 30
# The table is told of the newest iterations, no more than this at a time.
_MOST_STEPS = 64
# Says that caches should have all of a prompt.
ALL_TOKENS = 2**63


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
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            _, total_before, weight_before = self._seconds.pop()
            total, weight = total_before + total, weight_before + weight
        self._seconds.append((second, total, weight))

    def mean(self, now_s: float) -> float:
        recent = [one for one in self._seconds if one[0] > now_s - WINDOW_S]
        weight = sum(one[2] for one in recent)
        return sum(one[1] for one in recent) / weight if weight else 0.0


class LoadMeter:
    """Measures one engine's load. Times are of the monotonic clock.

    ``steps_s`` is how long all iterations took, and ``prompt_tokens`` what they computed of
    prompts.
    """

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self.steps_s = 0.0
        self.prompt_tokens = 0
        self.overdue_loads = 0
        self._requests = requests
        # For each request: prompt tokens that caches should have, and embeddings of images that its
        # node lacks.
        self._expected: dict[str, tuple[int, int]] = {}
        self._decodes = Lately()
        self._prefills = Lately()
        self._steps: deque[Step] = deque(maxlen=_MOST_STEPS)

    def load(self, now_s: float) -> EngineLoad:
        """Return the load now, with the iterations since it was last asked for."""
        steps = tuple(self._steps)
        self._steps.clear()
        prompts, decodes, encode_tokens = self._requested()
        return EngineLoad(
            sum(prompts.values()),
            decodes,
            self._decodes.mean(now_s),
            self._prefills.mean(now_s),
            encode_tokens=encode_tokens,
            steps=steps,
            overdue_loads=self.overdue_loads,
        )

    def waiting_tokens(self) -> int:
        """Return how many tokens of prompts the engine has to compute."""
        return sum(self._requested()[0].values())

    def _requested(self) -> tuple[dict[str, int], int, int]:
        """Return prompts' tokens, how many requests decode, and embeddings to be encoded."""
        # A request's choices share one prompt.
        prompts: dict[str, int] = {}
        decodes = encode_tokens = 0
        for request in self._requests.values():
            if not request.is_prefilling:
                decodes += 1
                continue
            expected, encodes = self._expected.get(request.external_req_id, (0, 0))
            computes = max(0, request.prompt_len - expected)
            if request.external_req_id not in prompts:
                # Images whose KV is found need no embeddings.
                encode_tokens += min(encodes, computes)
            prompts[request.external_req_id] = computes
        return prompts, decodes, encode_tokens

    def forget(self) -> None:
        """Forget the iterations until now, since an engine's first ones take many times as long."""
        self._steps.clear()

    @asynccontextmanager
    async def expecting(
        self, request_id: str, tokens: int, encode_tokens: int = 0
    ) -> AsyncIterator[None]:
        """Expect ``tokens`` of a request's prompt in caches, while it is in progress.

        Its images that have to be encoded have ``encode_tokens`` embeddings.
        """
        self._expected[request_id] = tokens, encode_tokens
        try:
            yield
        finally:
            self._expected.pop(request_id, None)

    def took(self, steps: Iterable[Step], now_s: float) -> None:
        for step in steps:
            self._steps.append(step)
            self.steps_s += step.lasted_s * step.count
            self.prompt_tokens += step.new_tokens * step.count
            if step.encoded_tokens:
                pass
            elif not step.new_tokens:
                self._decodes.add(step.lasted_s * step.count, step.count, now_s)
            elif step.new_tokens >= LEAST_PREFILL_TOKENS:
                self._prefills.add(step.new_tokens, step.lasted_s, now_s)


def measure(
    client: Any, images_failed: Callable[[list[str]], None], hangs: Callable[[float], None]
) -> LoadMeter:
    """Meter an ``AsyncLLM``. Without vLLM's statistics (``disable_log_stats``) no time is known.

    ``images_failed`` is told the identifiers of images that could not be encoded, and ``hangs`` for
    how many seconds LMCache's server has not answered a load.
    """
    meter = LoadMeter(client.output_processor.request_states)
    if client.logger_manager is not None:
        client.logger_manager.stat_loggers.append(_Iterations(meter, images_failed, hangs))
    return meter


@dataclass(eq=False)
class _Iterations(StatLoggerBase):  # type: ignore[misc]  # vLLM's types are not looked at.
    meter: LoadMeter
    images_failed: Callable[[list[str]], None]
    hangs: Callable[[float], None]

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        said = scheduler_stats.kv_connector_stats if scheduler_stats is not None else None
        if said and STEPS in said:
            self.meter.took((Step(*one) for one in said[STEPS]), time.monotonic())
        if said and FAILED_IMAGES in said:
            self.images_failed(said[FAILED_IMAGES])
        if said and OVERDUE in said:
            self.meter.overdue_loads += len(said[OVERDUE])
            self.hangs(max(said[OVERDUE]))

    def log_engine_initialized(self) -> None:
        pass


logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")


@dataclass(eq=False)
class Reporter:
    """Tells the table what the desk's outbox holds, and the desk what the table says.

    Reports go one at a time, so that they arrive in order; what happens meanwhile goes with the
    next. ``obey`` is told each notice, too, for the engine itself.
    """

    engine_id: str
    table: TableClient
    desk: Desk
    obey: Callable[[Notice], None] = lambda _: None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _registered: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._report()), loop.create_task(self._hear())]

    def registering(self) -> int:
        """Stop until `registered`; returns the number of the registration to come."""
        self._registered.clear()
        self.desk.stop()
        return self.desk.outbox.register()

    def registered(self) -> None:
        self._registered.set()

    @property
    def is_registered(self) -> bool:
        return self._registered.is_set()

    def has_more(self) -> None:
        self._due.set()

    async def _report(self) -> None:
        outbox = self.desk.outbox
        while True:
            await self._due.wait()
            await self._registered.wait()
            report, registration = outbox.next(), outbox.registration
            if report is None:
                self._due.clear()
                continue
            asked = self.table.report(self.engine_id, registration, report)
            answers, parks = await self._answered(asked)
            if registration != outbox.registration or not answers:
                continue
            if parks is None:
                self._unknown()
                continue
            outbox.answered(report.number)
            self.desk.parks = bool(parks)

    async def _hear(self) -> None:
        outbox = self.desk.outbox
        while True:
            await self._registered.wait()
            asked_s, registration = unix_s(), outbox.registration
            asked = self.table.hear(self.engine_id, registration, outbox.heard)
            answers, notice = await self._answered(asked)
            if not answers or registration != outbox.registration:
                continue
            if notice is None:
                self._unknown()
                continue
            self.desk.hear(notice, asked_s)
            try:
                self.obey(notice)
            except Exception:
                # An engine that hears no more notices would keep what the table has given away.
                logger.exception("decoder %s: a notice was not obeyed", self.engine_id)
            self._due.set()

    async def _answered(
        self, asked: Coroutine[Any, Any, Answer]
    ) -> tuple[Literal[True], Answer] | tuple[Literal[False], None]:
        try:
            return True, await asked
        except TableUnavailable as error:
            logger.warning("decoder %s: %s", self.engine_id, error)
        except Exception:
            # The loops go on: without reports the table would never know that a turn has ended.
            logger.exception("decoder %s: a call to the table failed", self.engine_id)
            await asyncio.sleep(BEAT_S)
        return False, None

    def _unknown(self) -> None:
        """Stop until the next beat, which finds that the table does not know this engine."""
        self._registered.clear()
        self.desk.stop()
