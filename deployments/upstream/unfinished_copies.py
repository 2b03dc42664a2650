"""Has an LMCache server discard chunks that an ended worker had begun to copy, and not committed.

LMCache 0.5.6 makes them readable when it unregisters the worker, so later conversations with that
prompt would load KV of which a part was never written, and get wrong answers.
"""

from typing import Any

from deployments.upstream.patch import Patch, of


def apply() -> None:
    from lmcache.v1.distributed.storage_manager import _L1_WRITE_TAG
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

    release: Any = EngineDrivenTransferModule._release_entry

    def discard_and_release(self: Any, instance_id: int, entry: Any) -> None:
        pending = self._pending_shm_writes
        with self._pending_shm_lock:
            unfinished = [pending.pop(store) for store in list(pending) if store[0] == instance_id]
        for keys in unfinished:
            self._ctx.storage_manager._l1_manager.finish_write_and_delete(keys, tag=_L1_WRITE_TAG)
        release(self, instance_id, entry)

    EngineDrivenTransferModule._release_entry = discard_and_release


_MODULE = "lmcache.v1.multiprocess.modules.engine_driven_transfer:EngineDrivenTransferModule"
PATCH = Patch(
    name="unfinished_copies",
    seams=(
        *of(_MODULE, "_release_entry _pending_shm_writes _pending_shm_lock"),
        *of("lmcache.v1.distributed.storage_manager", "StorageManager._l1_manager _L1_WRITE_TAG"),
        "lmcache.v1.distributed.l1_manager:L1Manager.finish_write_and_delete",
    ),
    why="wrong answers, after an engine on a CPU was killed while it stored a prompt",
    upstream="LMCache/LMCache PR #4068 (open; its third point is this)",
    process="lmcache",
)
