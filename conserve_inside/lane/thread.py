"""The worker's thread that computes prefills in chunks and encodes images, and the lock that it
shares with steps."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from conserve_inside.lane.images import Encode, EncodeEnd, EncodeOutcome, Found
from conserve_inside.lane.scheduler_lane import Job, LaneNotes, LaneReport

# Not LMCache's logger: loading LMCache looks at the GPU, and a worker on SM slots loads this file
# before it has set its share of the GPU.
logger = logging.getLogger("vllm.conserve")

# More than a chunk takes. An engine that ends waits no longer for it; the thread is a daemon.
_CHUNK_S = 10.0


class LaneEnds(Exception):
    """The engine ends, and its lane with it."""


class EncodeIsCut(Exception):
    """The request that an image is encoded for has ended."""


class Turns:
    """Lets the engine's step and the lane's chunk run the model one at a time.

    vLLM keeps the forward pass's context in a variable of its module. On a GPU the lock is held
    while kernels are launched, and these overlap. On a CPU it is held for the computation itself,
    and with ``alternate`` steps and chunks take turns. An encode is a chunk that may `pause`.
    """

    def __init__(self, alternate: bool) -> None:
        self._alternate = alternate
        self._changed = threading.Condition()
        self._busy = False
        self._steps_wait = 0
        self._chunk_waits = self._chunk_runs = False
        # Whether a step has passed since the last chunk.
        self._chunk_is_next = False
        self._over = False

    @contextmanager
    def step(self, ends: bool = True) -> Iterator[None]:
        with self._changed:
            self._steps_wait += 1
            self._changed.wait_for(
                lambda: not self._busy and not (self._chunk_is_next and self._chunk_waits)
            )
            self._steps_wait -= 1
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
        """Hold the lock for a chunk, or raise `LaneEnds`."""
        self._take()
        try:
            yield
        finally:
            self._give()

    def pause(self) -> None:
        """Let a step run within a chunk, if one waits; raises `LaneEnds`."""
        self._give()
        self._take()

    def _take(self) -> None:
        with self._changed:
            self._chunk_waits = True
            self._changed.wait_for(lambda: self._over or self._is_chunks_turn())
            self._chunk_waits = self._chunk_is_next = False
            if self._over:
                self._changed.notify_all()
                raise LaneEnds
            self._busy = self._chunk_runs = True

    def _give(self) -> None:
        with self._changed:
            # After a pause that has raised `LaneEnds`, a step may have the lock.
            if self._chunk_runs:
                self._busy = self._chunk_runs = False
                self._changed.notify_all()

    def _is_chunks_turn(self) -> bool:
        if self._busy:
            return False
        # A thread that gives the lock back and takes it again would be faster than any step.
        return self._chunk_is_next if self._alternate else not self._steps_wait

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Forward(Protocol):
    """The model, as the lane runs it; ``prefills``: whether it can compute the model's prompts."""

    prefills: bool

    def mark(self) -> Any:
        """Return a mark behind all that steps have launched; called in the engine's thread."""

    def prepare(self) -> None: ...

    def follow(self, mark: Any) -> None:
        """Have the next chunk begin after what is before the mark; called in the lane's thread."""

    def compute(self, job: Job, start: int, end: int) -> Callable[[], None]:
        """Launch a job's positions from ``start`` up to ``end``; returns what waits for them.

        The caller waits without holding the lock.
        """

    def encode(self, image: Encode, pause: Callable[[], None]) -> tuple[Any, Callable[[], None]]:
        """Launch an image's encode; returns its embeddings, and what waits for them.

        ``pause`` is called between parts of the encoder. What it raises is passed on.
        """

    def load(self, image: Found) -> None:
        """Put embeddings that the node has there; called in the engine's thread."""

    def keep(self, image: Encode, embeds: Any) -> None:
        """Put embeddings where steps and chunks find them; called in the engine's thread."""


@dataclass(slots=True)
class _Over:
    job: Job
    # The first position whose KV was not computed.
    until: int
    error: bool = False


class LaneThread:
    """Computes jobs one after the other, and reports which have ended.

    A job that is given up ends with its current chunk, which writes to its blocks, or with the
    current part of the encoder. A job that fails ends too, and the engine goes on.
    """

    def __init__(self, forward: Forward, turns: Turns, block_tokens: int) -> None:
        self._forward = forward
        self._turns = turns
        self._block_tokens = block_tokens
        self._chunk_tokens = block_tokens
        # Each with the mark behind the step that it came with.
        self._jobs: queue.SimpleQueue[tuple[Job | Encode, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Jobs that have not ended, and those of them that are given up.
        self._open: set[str] = set()
        self._given_up: set[str] = set()
        self._over: list[_Over] = []
        self._computed: dict[str, int] = {}
        # The encode that has ended, with its embeddings.
        self._encoded: tuple[Encode, Any, EncodeEnd] | None = None
        self._thread = threading.Thread(target=self._run, name="prefill-lane", daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def begin(self, notes: LaneNotes) -> None:
        self._chunk_tokens = notes.chunk_tokens
        for image in notes.loads:
            self._forward.load(image)
        encodes = () if notes.encode is None else (notes.encode,)
        for job in (*notes.jobs, *encodes):
            with self._lock:
                self._open.add(job.request_id)
            self._jobs.put((job, self._forward.mark()))

    def give_up(self, request_ids: Collection[str]) -> None:
        with self._lock:
            self._given_up |= self._open.intersection(request_ids)

    def take(self) -> tuple[set[str], set[int], LaneReport | None]:
        """Return requests that have ended, their blocks that were not computed, and a report."""
        with self._lock:
            over, self._over = self._over, []
            computed, self._computed = self._computed, {}
            encoded, self._encoded = self._encoded, None
        end = None
        if encoded is not None:
            image, embeds, end = encoded
            if end.outcome == "done":
                self._forward.keep(image, embeds)
        failed = {one.job.request_id for one in over if one.error}
        missing: set[int] = set()
        for one in over:
            if one.error:
                first, size = one.until // self._block_tokens, self._block_tokens
                missing.update(one.job.block_ids[first : -(-one.job.end // size)])
        report = LaneReport(computed, failed, encode=end) if (computed or failed or end) else None
        return {one.job.request_id for one in over}, missing, report

    def end(self) -> None:
        self._turns.end()
        self._jobs.put(None)
        self._thread.join(_CHUNK_S)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._forward.prepare()
            while (next_one := self._jobs.get()) is not None:
                job, mark = next_one
                if isinstance(job, Encode):
                    self._encode(job, mark)
                else:
                    self._close(self._prefill(job, mark))
        except LaneEnds:
            return

    def _prefill(self, job: Job, mark: Any) -> _Over:
        at = job.start
        try:
            while at < job.end and not self._is_given_up(job):
                with self._turns.chunk():
                    if self._is_given_up(job):
                        # The step before this turn may have dropped its images.
                        break
                    if at == job.start:
                        # Within the chunk's turn, since its stream changes between steps.
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

    def _encode(self, image: Encode, mark: Any) -> None:
        def pause() -> None:
            self._turns.pause()
            if self._is_given_up(image):
                raise EncodeIsCut

        began_s = time.monotonic()
        embeds: Any = None
        outcome: EncodeOutcome = "done"
        try:
            with self._turns.chunk():
                self._forward.follow(mark)
                embeds, wait = self._forward.encode(image, pause)
            wait()
        except LaneEnds:
            raise
        except EncodeIsCut:
            outcome = "cut"
        except Exception:
            logger.exception("the lane failed; a step encodes for request %s", image.request_id)
            outcome = "failed"
        with self._lock:
            self._open.discard(image.request_id)
            self._given_up.discard(image.request_id)
            end = EncodeEnd(outcome, time.monotonic() - began_s)
            self._encoded = image, embeds, end

    def _is_given_up(self, job: Job | Encode) -> bool:
        with self._lock:
            return job.request_id in self._given_up

    def _close(self, over: _Over) -> None:
        with self._lock:
            self._open.discard(over.job.request_id)
            self._given_up.discard(over.job.request_id)
            self._over.append(over)
