"""A worker that has loaded its model calls no one, or a given function."""

import inspect
from typing import Any

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.v1.worker.gpu_worker import Worker

from deployments.upstream.unhooked_loading import call_when_loaded


def test_vllm_gives_a_connector_no_model() -> None:
    assert [*inspect.signature(ECConnectorBase.start_worker_services).parameters] == ["self"]
    assert "model" not in vars(ECConnectorBase)


def test_a_patched_worker_passes_itself_on_once_it_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    def load_model(worker: Any, *, load_dummy_weights: bool = False) -> None:
        done.append(load_dummy_weights)

    monkeypatch.setattr(Worker, "load_model", load_model)
    call_when_loaded(done.append)
    worker = object.__new__(Worker)
    worker.load_model(load_dummy_weights=True)
    assert done == [True, worker]
