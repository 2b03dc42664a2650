"""A worker's stores, and when their blocks are free.

KV is copied beside the steps that follow: on a GPU by LMCache's server, from the engine's memory;
on a CPU by a thread of the worker's. Until then no other request may write to its blocks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.logging import init_logger
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from deployments.engine.stored import Address

logger = init_logger(__name__)

# A server that hangs is killed before that (deployments/node), which breaks the connection. One
# that lives and has not answered by then has failed at the store, and reads nothing.
FORGOTTEN_S = 120.0
# Short beside a copy, and long beside what a look costs (some 20 us on a GPU).
_LOOKS_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class StepNotes:
    """Tells workers' connectors with each step what the scheduler's connector knows.

    Attributes:
        whole: requests of whose prompts nothing more is stored after this step, and where to tell
            that.
        gone: the same of requests that have ended before ``whole`` had them.
        ended: requests that have ended, whose blocks are kept until their stores have.
        preempted: requests whose blocks others may write to from this step on.
        images: identifiers of the images of requests that store something in this step.
    """

    step: int
    whole: Mapping[str, Address] = field(default_factory=dict)
    gone: Mapping[str, Address] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    preempted: frozenset[str] = frozenset()
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Steps:
    """Knows whether everything that a step builds on was computed.

    With asynchronous scheduling a worker may get steps of the same prompts after one that a SIGTERM
    or an error broke off. What they compute is wrong as well.
    """

    done: int = -1
    broken: bool = False

    def begin(self, step: int) -> None:
        if step != self.done + 1 and not self.broken:
            self.broken = True
            logger.error("step %d was not computed: this engine stores no more KV", self.done + 1)

    def end(self, step: int) -> None:
        if not self.broken:
            self.done = step


@dataclass(slots=True)
class _Store:
    future: Any
    # CUDA needs the exporting event for as long as the server may wait for it.
    event: Any
    step: int
    asked_s: float
    # Losses of the connection before it; None: this process copies, without the connection.
    losses: int | None


@dataclass(slots=True)
class Stores:
    """Stores in progress, by request.

    A thread tells of a prompt as soon as it is stored, however long the current step takes.
    ``losses`` returns how often the connection to the server was lost so far.
    """

    losses: Callable[[], int]
    tell: Callable[[Address], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _open: dict[str, list[_Store]] = field(default_factory=dict)
    _awaited: list[tuple[str, Address]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def add(
        self, request_id: str, future: Any, event: Any = None, step: int = 0, copies: bool = False
    ) -> None:
        """Note a store, copied by this process (``copies``) or by the server."""
        losses = None if copies else self.losses()
        store = _Store(future, event, step, self.clock(), losses)
        with self._changed:
            self._open.setdefault(request_id, []).append(store)

    def tell_when_stored(self, request_id: str, address: Address) -> None:
        with self._changed:
            self._awaited.append((request_id, address))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name="stored")
                self._thread.start()

    def under_way(self, request_id: str) -> bool:
        """Return whether this request's blocks may still be read."""
        with self._changed:
            begun = self._open.get(request_id, ())
            left = [one for one in begun if not self._over(request_id, one)]
            if left:
                self._open[request_id] = left
            else:
                self._open.pop(request_id, None)
            return bool(left)

    def oldest_step(self) -> int | None:
        with self._changed:
            for request_id in list(self._open):
                self.under_way(request_id)
            return min((one.step for stores in self._open.values() for one in stores), default=None)

    def wait(self, requests: Collection[str], timeout_s: float = FORGOTTEN_S) -> bool:
        """Wait for the stores of these requests; returns whether they have ended."""
        deadline_s = self.clock() + timeout_s
        for request_id in requests:
            while self.under_way(request_id):
                if self.clock() >= deadline_s:
                    return False
                self.sleep(_LOOKS_EVERY_S)
        return True

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._awaited:
                    self._changed.wait()
                awaited = list(self._awaited)
            for one in awaited:
                request_id, address = one
                if self.under_way(request_id):
                    continue
                with self._changed:
                    self._awaited.remove(one)
                try:
                    self.tell(address)
                except Exception:
                    logger.exception("could not tell that request %s is stored", request_id)
            time.sleep(_LOOKS_EVERY_S)

    def _over(self, request_id: str, store: _Store) -> bool:
        if store.losses is not None and store.losses != self.losses():
            return True
        try:
            if store.future.query():
                if not store.future.result(timeout=0):
                    logger.warning("LMCache has not stored KV of request %s", request_id)
                return True
        except Exception as error:
            logger.warning("LMCache has not stored KV of request %s: %s", request_id, error)
            return True
        # This process's own copies end by themselves, since its calls to the server have bounds.
        if store.losses is None or self.clock() - store.asked_s < FORGOTTEN_S:
            return False
        logger.error("LMCache has not answered a store of request %s", request_id)
        return True


# --- blocks that a request gives up before it ends ------------------------------------------------


def groups_that_give_up(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the groups of layers whose blocks a request gives up as it goes on.

    Sliding windows and Mamba's states do; full attention keeps its blocks to the end.
    """
    if kv_cache_config is None:
        return ()
    return tuple(
        at
        for at, group in enumerate(kv_cache_config.kv_cache_groups)
        if not _keeps(group.kv_cache_spec)
    )


def _keeps(spec: Any) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_keeps, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


@dataclass(slots=True)
class StoresReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's types are not seen.
    """Tells the scheduler's connector that all steps up to ``done`` are stored."""

    done: int

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata":
        assert isinstance(other, StoresReport)
        return StoresReport(min(self.done, other.done))


@dataclass(slots=True)
class Pins:
    """Holds blocks that are being stored, of groups of layers whose blocks requests give up."""

    groups: tuple[int, ...] = ()
    pool: Any = None
    _pinned: deque[tuple[int, list[Any]]] = field(default_factory=deque)

    def pin(self, step: int, block_ids: Sequence[Sequence[int]]) -> None:
        ids = [one for group in self.groups for one in block_ids[group]]
        # vLLM's null block is where a group has no block.
        blocks = [self.pool.blocks[one] for one in ids if not self.pool.blocks[one].is_null]
        if blocks:
            self.pool.touch(blocks)
            self._pinned.append((step, blocks))

    def release(self, done: int) -> None:
        while self._pinned and self._pinned[0][0] <= done:
            _, blocks = self._pinned.popleft()
            # The deepest blocks go first, as where vLLM frees a request.
            self.pool.free_blocks(reversed(blocks))
