"""Chunks that a killed worker had begun to copy to its LMCache server's memory."""

import threading
from types import SimpleNamespace

import pytest
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule


def _becomes(instance_id: int) -> list[tuple[str, str]]:
    """What becomes of unfinished chunks, as the server unregisters this worker."""
    became: list[tuple[str, str]] = []

    def note(what: str, keys: list[str]) -> None:
        became.extend((key, what) for key in keys)

    module = object.__new__(EngineDrivenTransferModule)
    module._pending_shm_lock = threading.Lock()
    module._pending_shm_writes = {(7, "store"): ["a"], (8, "store"): ["b"]}
    module._pending_shm_reads = {}
    module._ctx = SimpleNamespace(
        storage_manager=SimpleNamespace(
            finish_write=lambda keys: note("readable", keys),
            _l1_manager=SimpleNamespace(
                finish_write_and_delete=lambda keys, tag: note("discarded", keys)
            ),
        ),
        layout_desc_registry=SimpleNamespace(unregister=lambda *of: None),
    )
    module._release_entry(instance_id, SimpleNamespace(model_name="m", world_size=1))
    return became


def test_the_server_makes_them_readable() -> None:
    assert _becomes(7) == [("a", "readable")]


@pytest.mark.usefixtures("patched")
def test_the_patched_server_discards_them() -> None:
    assert _becomes(7) == [("a", "discarded")]
