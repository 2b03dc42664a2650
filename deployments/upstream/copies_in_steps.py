"""Has workers on a CPU copy KV in a thread of their own, and not in the step.

LMCache 0.5.6 does so only for accelerators that its server cannot copy from. On a CPU it is safe,
since a step's KV is complete when the step has ended. LMCache's context also unregisters while it
copies, and the server then gives that memory to other stores.
"""

import contextlib
import gc
from typing import Any

from deployments.upstream.patch import Patch, of


def apply() -> None:
    from lmcache.v1.multiprocess.transfer_context import worker_transfer
    from lmcache.v1.multiprocess.transfer_context.async_engine_driven import (
        AsyncEngineDrivenTransferContext,
    )

    class Copies(AsyncEngineDrivenTransferContext):  # type: ignore[misc]  # LMCache ships no types.
        """Copies between an engine's memory and that of one run of the server."""

        def unregister(self) -> Any:
            """End the copies first, since the server gives their memory to other stores."""
            self._begin_no_more()
            self._commit_executor.shutdown(wait=True)
            # A signal may have broken off what added one, and LMCache would wait for it for ever.
            with self._inflight_lock:
                self._pending_stores.clear()
            return super().unregister()

        def retire(self) -> None:
            """Have waiting stores fail: this memory is of a server that may have gone."""
            self._begin_no_more()
            if self._engine_driven_context is not None:
                self._engine_driven_context.prepare_store = _refuse
            # A call that failed refers to itself by its exception, and so to this memory, which may
            # be large. An idle engine's collector does not look there for minutes.
            with contextlib.suppress(RuntimeError):  # It has unregistered, and its process ends.
                self._commit_executor.submit(gc.collect)

        def _begin_no_more(self) -> None:
            with self._inflight_lock:
                self._is_closing = True

    last: Copies | None = None

    def build(instance_id: int, client: Any) -> Any:
        nonlocal last
        # It registers again after the server has restarted, or may have forgotten it.
        if last is not None:
            last.retire()
        # The server leaves out chunks that are being stored already. With one thread, a prompt that
        # shares them is not reported as stored before they are.
        last = Copies(instance_id, client, commit_workers=1)
        return last

    worker_transfer._build_engine_driven_context = build


def _refuse(*of: Any) -> Any:
    raise ConnectionError("LMCache's server has restarted since this store began to wait")


_ASYNC = (
    "lmcache.v1.multiprocess.transfer_context.async_engine_driven:AsyncEngineDrivenTransferContext"
)
PATCH = Patch(
    name="copies_in_steps",
    seams=(
        "lmcache.v1.multiprocess.transfer_context.worker_transfer:_build_engine_driven_context",
        *of(
            _ASYNC,
            "__init__ unregister _is_closing _inflight_lock _pending_stores _commit_executor "
            "_engine_driven_context",
        ),
    ),
    why="on a CPU each store of a prompt delays the tokens of all turns of its engine",
    upstream="LMCache/LMCache#4069 (its context only; not that a CPU's stores block the step)",
    process="connector",
    device="cpu",
)
