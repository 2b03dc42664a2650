"""The worker's thread that computes prefills, chunk by chunk."""

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from lmcache.logging import init_logger

from deployments.engine.lane.scheduler_lane import Job, LaneNotes, LaneReport

logger = init_logger(__name__)

# A chunk takes no longer. Whoever ends goes on without it then: the thread is a daemon.
_CHUNK_S = 10.0


class LaneEnds(Exception):
    """The engine ends, and its lane with it."""


class Turns:
    """A lock for two threads.

    Args:
        alternate: whether a chunk follows each step, and a step each chunk, for as long as there
            are both. Else whoever comes first.
    """

    def __init__(self, alternate: bool) -> None:
        self._alternate = alternate
        self._changed = threading.Condition()
        self._busy = False
        self._chunk_waits = False
        # Whether a step has passed since the last chunk.
        self._chunk_is_next = False
        self._over = False

    @contextmanager
    def step(self, ends: bool = True) -> Iterator[None]:
        """A step's turn, or (``ends`` False) that of a part of it.

        A chunk whose turn it is goes first.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._busy and not (self._chunk_is_next and self._chunk_waits)
            )
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._chunk_is_next = self._alternate and (ends or self._chunk_is_next)
                self._changed.notify_all()

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """A chunk's turn.

        Raises:
            LaneEnds: there is none any more.
        """
        with self._changed:
            self._chunk_waits = True
            self._changed.wait_for(
                lambda: (
                    self._over or (not self._busy and (self._chunk_is_next or not self._alternate))
                )
            )
            self._chunk_waits = self._chunk_is_next = False
            if self._over:
                self._changed.notify_all()
                raise LaneEnds
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def end(self) -> None:
        """No chunk begins any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Forward(Protocol):
    """Computes chunks (`LaneForward`)."""

    def mark(self) -> Any:
        """In the engine's thread: a mark behind all that its steps have launched."""

    def prepare(self) -> None:
        """In the lane's thread, before anything else."""

    def follow(self, mark: Any) -> None:
        """In the lane's thread: what comes next begins when what is before the mark is done."""

    def compute(self, job: Job, start: int, end: int) -> Callable[[], None]:
        """Launch a job's positions from ``start`` up to ``end``.

        Returns:
            What to call, without the turn, to wait until they are computed.
        """


@dataclass(slots=True)
class _Over:
    job: Job
    # Up to where its KV is right.
    until: int
    error: bool = False


class LaneThread:
    """Computes jobs one after the other, and says which are over.

    A job that is given up while it is computed is over when its chunk is: until then its blocks
    are written to. One that fails is over, too; the engine lives.

    Args:
        forward: what computes a chunk.
        turns: when it may.
        block_tokens: of the engine's blocks.
    """

    def __init__(self, forward: Forward, turns: Turns, block_tokens: int) -> None:
        self._forward = forward
        self._turns = turns
        self._block_tokens = block_tokens
        self._chunk_tokens = block_tokens
        # Each with the mark behind the step with which it came.
        self._jobs: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Known and not over, and those of them that nobody wants any more.
        self._open: set[str] = set()
        self._given_up: set[str] = set()
        self._over: list[_Over] = []
        self._computed: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="prefill-lane", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller is the lane."""
        return threading.get_ident() == self._thread.ident

    def begin(self, notes: LaneNotes) -> None:
        """Take jobs in, and how long chunks may be."""
        self._chunk_tokens = notes.chunk_tokens
        for job in notes.jobs:
            with self._lock:
                self._open.add(job.request_id)
            self._jobs.put((job, self._forward.mark()))

    def give_up(self, request_ids: Collection[str]) -> None:
        """Requests have ended; those whose jobs are not over yet want them no more."""
        with self._lock:
            self._given_up |= self._open.intersection(request_ids)

    def take(self) -> tuple[set[str], set[int], LaneReport | None]:
        """Take what is new: requests that are over, their blocks that were not computed, and what
        was.
        """
        with self._lock:
            over, self._over = self._over, []
            computed, self._computed = self._computed, {}
        failed = {one.job.request_id for one in over if one.error}
        missing: set[int] = set()
        for one in over:
            if one.error:
                first, size = one.until // self._block_tokens, self._block_tokens
                missing.update(one.job.block_ids[first : -(-one.job.end // size)])
        report = LaneReport(computed, failed) if computed or failed else None
        return {one.job.request_id for one in over}, missing, report

    def end(self) -> None:
        """End, when the chunk under way is."""
        self._turns.end()
        self._jobs.put(None)
        self._thread.join(_CHUNK_S)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._forward.prepare()
            while (next_one := self._jobs.get()) is not None:
                self._close(self._prefill(*next_one))
        except LaneEnds:
            return

    def _prefill(self, job: Job, mark: Any) -> _Over:
        at = job.start
        try:
            while at < job.end and not self._is_given_up(job):
                with self._turns.chunk():
                    if at == job.start:
                        # On the stream that the chunk is launched on: it changes between steps.
                        self._forward.follow(mark)
                    until = min(job.end, at + max(1, self._chunk_tokens))
                    wait = self._forward.compute(job, at, until)
                wait()
                with self._lock:
                    done = self._computed.get(job.request_id, 0)
                    self._computed[job.request_id] = done + until - at
                at = until
        except LaneEnds:
            raise
        except Exception:
            logger.exception("the lane failed; request %s is prefilled inline", job.request_id)
            return _Over(job, at, error=True)
        return _Over(job, at)

    def _is_given_up(self, job: Job) -> bool:
        with self._lock:
            return job.request_id in self._given_up

    def _close(self, over: _Over) -> None:
        with self._lock:
            self._open.discard(over.job.request_id)
            self._given_up.discard(over.job.request_id)
            self._over.append(over)
