"""An engine waits for what its predecessor had of a GPU's memory."""

import logging
import os

import pytest

from hetero.cards import wait_for_memory
from hetero.nvml import Nvml, NvmlError
from tests.nvml.standin import Machine

GIB = 1 << 30


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "conserve.gpus")
    return caplog


@pytest.mark.parametrize("freed_after_s", [12.0, 1000.0])
def test_it_waits_until_the_memory_is_free_but_not_for_ever(
    machine: Machine, nvml: Nvml, said: pytest.LogCaptureFixture, freed_after_s: float
) -> None:
    gpu = machine.gpus[1]
    gpu.used_bytes = 40 * GIB
    gpu.run(os.getpid())
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s >= freed_after_s:
            gpu.used_bytes = 3 * GIB

    freed = wait_for_memory(nvml, gpu.id, 43 * GIB, 60, lambda: now_s, sleep)
    assert freed is (freed_after_s < 60)
    assert now_s == min(freed_after_s, 60)
    waiting, over = said.messages
    # What there is, what is wanted, and what is waited for, in one line.
    assert f"{gpu.id}: 8.0 GiB is free of 43.0 GiB needed" in waiting
    assert "LMCache's server" in waiting
    assert str(os.getpid()) in waiting
    assert ("45.0 GiB is free after 12 s" if freed else ": too little") in over


def test_nothing_is_said_where_there_is_room(
    machine: Machine, nvml: Nvml, said: pytest.LogCaptureFixture
) -> None:
    assert wait_for_memory(nvml, machine.gpus[0].id, 48 * GIB, 60)
    assert not said.messages


def test_a_gpu_that_cannot_be_asked_is_not_waited_for(machine: Machine, nvml: Nvml) -> None:
    machine.gpus[0].lost = 1
    with pytest.raises(NvmlError):
        wait_for_memory(nvml, machine.gpus[0].id, GIB, 60)
