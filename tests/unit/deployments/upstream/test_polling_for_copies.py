"""How often an LMCache server without a GPU looks for copies."""

import pytest
import torch
from lmcache.v1.multiprocess.native_completion import DeviceHostFuncDispatcher

from deployments.upstream import polling_for_copies


def test_a_dispatcher_looks_200_times_a_second() -> None:
    # As it is made where LMCache makes its own.
    assert DeviceHostFuncDispatcher().interval == 0.005


@pytest.mark.parametrize(("gpu", "seconds"), [(False, 1.0), (True, 0.005)])
def test_a_patched_one_rests_without_a_gpu(
    gpu: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = DeviceHostFuncDispatcher.__init__
    before = start.__defaults__
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
    polling_for_copies.apply()
    try:
        assert DeviceHostFuncDispatcher().interval == seconds
    finally:
        start.__defaults__ = before
