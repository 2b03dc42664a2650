"""Runs a workload's conversations against an endpoint, and records every turn.

One process and one event loop, for thousands of open conversations. Arrivals are open loop: a
conversation starts when its time has come, however slow the system is. Within a conversation a
turn follows the answer to the one before.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conserve_lab.client import Client, Endpoint, EndpointError, with_model
from conserve_lab.counters import rise
from conserve_lab.machine import gpu_energy_j
from conserve_lab.records import Script, TurnRecord

ArrivalPlan = Iterable[tuple[float, Script]]
"""Arrival in seconds from the run's start, ascending, and the conversation that arrives."""

_LAG_PERIOD_S = 0.05
_PROGRESS_PERIOD_S = 0.25
_RECENT = 500
# Beyond these, the driver rather than the system may be what was measured.
_LAG_LIMIT_S = 0.02
_CPU_LIMIT = 0.8


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """How a run is driven.

    Attributes:
        turn_timeout_s: a turn that takes longer is given up, and recorded as ``timeout``.
        duration_s: the run is stopped after that time; open turns are ``unfinished``.
        concurrency: most conversations open at the same time; others that have arrived wait.
        gaps: False: turns follow each other at once.
        cache_salt: vLLM's, for the whole run, so that what earlier runs cached is not found.
        id_prefix: put before conversation ids on the wire, so that no two runs share one.
    """

    turn_timeout_s: float = 600.0
    duration_s: float | None = None
    concurrency: int | None = None
    gaps: bool = True
    cache_salt: str | None = None
    id_prefix: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run; medians are of the latest turns and conversations, in seconds."""

    arrived: int
    open: int
    turns: int
    failures: int
    ttft_p50_s: float | None
    ttfet_p50_s: float | None


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the driver itself was, in seconds.

    Attributes:
        loop_p50_s, loop_p99_s, loop_max_s: how late a periodic task of the event loop woke; every
            time in the records may be off by that much.
        send_p99_s: how long after its planned time a turn was sent.
        cpu_share: of one core's time.
    """

    loop_p50_s: float
    loop_p99_s: float
    loop_max_s: float
    send_p99_s: float
    cpu_share: float

    def warning(self) -> str | None:
        """Say what to do where the driver was the limit, else None."""
        if max(self.loop_p99_s, self.send_p99_s) <= _LAG_LIMIT_S and self.cpu_share <= _CPU_LIMIT:
            return None
        return (
            f"The benchmark itself was a limit (its event loop woke {self.loop_p99_s * 1e3:.0f} ms "
            f"late and turns were sent {self.send_p99_s * 1e3:.0f} ms late at p99; "
            f"{self.cpu_share:.0%} of a core): give it a core of its own, or a lower rate."
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run's records and what else was seen.

    Attributes:
        records: in the order of their ends; times count from the run's start.
        arrived: conversations that started.
        interrupted: whether it ended before all conversations did.
        wrong_lengths: completed turns whose output did not have the length that was forced.
        not_released: conversations whose end could not be told.
        counters: how much the server's own counters rose; None: not available.
        energy_j: what all GPUs of this machine used, if the endpoint is here too; None: not
            available.
    """

    system: str
    records: list[TurnRecord]
    lag: Lag
    wall_s: float
    arrived: int
    interrupted: bool
    wrong_lengths: int
    not_released: int
    counters: dict[str, float] | None = None
    energy_j: float | None = None


async def drive(
    endpoint: Endpoint,
    plan: ArrivalPlan,
    options: DriveOptions | None = None,
    *,
    on_record: Callable[[TurnRecord], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
    proven: bool = False,
) -> Run:
    """Run a plan to its end, or until ``stop`` is set; then its open turns are ``unfinished``.

    A failed turn ends its conversation. An error that a script raises ends the run.

    Args:
        on_progress: called a few times a second.
        proven: whether the endpoint has answered turns before, so that a first answer that is an
            error is no reason to break off.

    Raises:
        EndpointError: nothing answers at the URL, or the run's first answer is an error.
        ValueError: the plan's arrivals are not ascending.
    """
    driver = _Driver(await with_model(endpoint), options or DriveOptions(), on_record, proven)
    return await driver.run(plan, stop or asyncio.Event(), on_progress)


async def unloaded(
    endpoint: Endpoint,
    scripts: Iterable[Script],
    options: DriveOptions | None = None,
    *,
    on_record: Callable[[TurnRecord], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """Run conversations one at a time, without gaps: what the system does without load.

    Objectives are relative to it (conserve, section 5.3: the baseline is measured "by executing a
    single request without batching or interference").
    """
    return await drive(
        endpoint,
        ((0.0, script) for script in scripts),
        replace(options or DriveOptions(), concurrency=1, gaps=False),
        on_record=on_record,
        on_progress=on_progress,
        stop=stop,
    )


class _Driver:
    def __init__(
        self,
        endpoint: Endpoint,
        options: DriveOptions,
        on_record: Callable[[TurnRecord], None] | None,
        proven: bool,
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._on_record = on_record
        self._client = Client(
            endpoint, self._now, options.turn_timeout_s, options.cache_salt, options.id_prefix
        )
        self._began_s = time.perf_counter()
        self._records: list[TurnRecord] = []
        self._arrived = self._open = 0
        self._wrong_lengths = self._not_released = 0
        self._answered = proven
        self._loop_lags_s: list[float] = []
        self._shown = _Recent()

    def _now(self) -> float:
        return time.perf_counter() - self._began_s

    async def _sleep_until(self, due_s: float) -> None:
        # It yields even when the time has come already, so that other tasks run.
        await asyncio.sleep(max(0.0, due_s - self._now()))

    async def run(
        self, plan: ArrivalPlan, stop: asyncio.Event, on_progress: Callable[[Progress], None] | None
    ) -> Run:
        async with self._client:
            counted, used_j = await self._client.counters(), self._energy_j()
            cpu_began_s = time.process_time()
            self._began_s = time.perf_counter()
            interrupted = await self._until(stop, self._converse_all(plan), on_progress)
            wall_s = self._now()
            cpu_share = (time.process_time() - cpu_began_s) / wall_s
            now_used_j, now_counted = self._energy_j(), await self._client.counters()
        if on_progress is not None:
            on_progress(self._progress())
        return Run(
            self._endpoint.system,
            self._records,
            self._lag(cpu_share),
            wall_s,
            self._arrived,
            interrupted,
            self._wrong_lengths,
            self._not_released,
            rise(counted, now_counted),
            None if used_j is None or now_used_j is None else now_used_j - used_j,
        )

    def _energy_j(self) -> float | None:
        return gpu_energy_j() if self._endpoint.is_here else None

    async def _until(
        self,
        stop: asyncio.Event,
        work: Awaitable[None],
        on_progress: Callable[[Progress], None] | None,
    ) -> bool:
        """Do the work; returns whether it was broken off. None of it is running afterwards."""
        working = asyncio.ensure_future(work)
        others = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._watch_lag())]
        if on_progress is not None:
            others.append(asyncio.ensure_future(self._report(on_progress)))
        try:
            # Whichever of them ends, the run does: none of the others ends without a reason.
            await asyncio.wait(
                [working, *others],
                timeout=self._options.duration_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            broken_off = not working.done()
            for task in (working, *others):
                task.cancel()
            await asyncio.wait([working, *others])
        for task in (working, *others):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise _first(error)
        return broken_off

    # --- Conversations ----------------------------------------------------------------------------

    async def _converse_all(self, plan: ArrivalPlan) -> None:
        room = asyncio.Semaphore(self._options.concurrency or 2**31)
        arrivals = iter(plan)
        latest_s = room_since_s = 0.0

        def leave(_: object) -> None:
            nonlocal room_since_s
            if room.locked():
                room_since_s = self._now()
            self._open -= 1
            room.release()

        async with asyncio.TaskGroup() as conversations:
            # Making a plan may mean reading files, so it is done beside the event loop.
            while (arrival := await asyncio.to_thread(next, arrivals, None)) is not None:
                arrival_s, script = arrival
                if arrival_s < latest_s:
                    raise ValueError(
                        f"conversation {script.conversation} arrives at {arrival_s:g} s, after one "
                        f"that arrives at {latest_s:g} s; put the plan in the order of arrival"
                    )
                latest_s = arrival_s
                await self._sleep_until(arrival_s)
                await room.acquire()
                self._arrived += 1
                self._open += 1
                starts_s = max(arrival_s, room_since_s)
                conversations.create_task(self._converse(starts_s, script)).add_done_callback(leave)

    async def _converse(self, starts_s: float, script: Script) -> None:
        request = script.next(None)
        turn, ready_s = 0, starts_s
        try:
            while request is not None:
                turn += 1
                planned_s = ready_s + (request.gap_s if self._options.gaps else 0.0)
                await self._sleep_until(planned_s)
                body = self._client.encode(request)
                record = TurnRecord(
                    system=self._endpoint.system,
                    conversation=script.conversation,
                    turn=turn,
                    planned_s=planned_s,
                    sent_s=self._now(),
                    ended_s=0.0,
                    outcome="unfinished",
                )
                forced_tokens = request.output_tokens
                try:
                    answer = await self._client.turn(request, body, record)
                    ready_s = record.ended_s
                    request = script.next(answer) if answer is not None else None
                    record.last = answer is not None and request is None
                finally:
                    self._keep(record, forced_tokens)
        finally:
            if turn and self._endpoint.release:
                # In two steps: others add to it during the wait.
                released = await self._client.release(script.conversation)
                self._not_released += not released

    def _keep(self, record: TurnRecord, forced_tokens: int | None) -> None:
        self._records.append(record)
        self._shown.add(record)
        if self._on_record is not None:
            self._on_record(record)
        if record.outcome == "completed" and forced_tokens not in (None, record.output_tokens):
            self._wrong_lengths += 1
        # The very first thing that comes back tells whether this endpoint can be measured.
        refused = record.outcome == "failed" and record.first_token_s is None
        if refused and not self._answered:
            raise EndpointError(f"{self._endpoint.url} answered the first turn: {record.error}")
        self._answered = True

    # --- Watching ---------------------------------------------------------------------------------

    async def _watch_lag(self) -> None:
        while True:
            due_s = self._now() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._loop_lags_s.append(self._now() - due_s)

    async def _report(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            on_progress(self._progress())
            await asyncio.sleep(_PROGRESS_PERIOD_S)

    def _progress(self) -> Progress:
        return Progress(
            arrived=self._arrived,
            open=self._open,
            turns=len(self._records),
            failures=self._shown.failures,
            ttft_p50_s=_median(self._shown.ttfts_s),
            ttfet_p50_s=_median(self._shown.ttfets_s),
        )

    def _lag(self, cpu_share: float) -> Lag:
        loop_s = self._loop_lags_s or [0.0]
        sent_s = [record.sent_s - record.planned_s for record in self._records] or [0.0]
        p50_s, p99_s, max_s = (float(p) for p in np.percentile(loop_s, (50, 99, 100)))
        return Lag(p50_s, p99_s, max_s, float(np.percentile(sent_s, 99)), cpu_share)


class _Recent:
    """Figures of the progress display, kept up as records come."""

    def __init__(self) -> None:
        self.failures = 0
        self.ttfts_s: deque[float] = deque(maxlen=_RECENT)
        self.ttfets_s: deque[float] = deque(maxlen=_RECENT)
        # When each conversation was first sent; None once it has had output for the user.
        self._waiting_since_s: dict[str, float | None] = {}

    def add(self, record: TurnRecord) -> None:
        self.failures += record.outcome in ("failed", "timeout")
        since_s = self._waiting_since_s.setdefault(record.conversation, record.sent_s)
        if record.first_token_s is None:
            return
        self.ttfts_s.append(record.first_token_s - record.sent_s)
        if record.effective and since_s is not None:
            self.ttfets_s.append(record.first_token_s - since_s)
            self._waiting_since_s[record.conversation] = None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _first(error: BaseException) -> BaseException:
    """Return the first error, out of the groups that tasks' errors come in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
