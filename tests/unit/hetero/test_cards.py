"""The GPUs that engines may use, by the real nvidia-ml-py on the stand-in."""

import pytest

from hetero.cards import Card, cards_here
from tests.nvml.standin import NO_MIG, Machine

A40 = Card("NVIDIA A40", 48 << 30)


def test_each_gpu_with_its_memory(machine: Machine) -> None:
    machine.gpus[1].used_bytes = 5 << 30
    assert cards_here() == (A40, Card("NVIDIA A40", 48 << 30, 5 << 30))


@pytest.mark.parametrize(
    ("shown", "count"),
    [("1", 1), ("0,1", 2), ("", 0), ("GPU-00000000-0000-0000-0000-000000000001", 1)],
)
def test_those_alone_that_cuda_is_shown(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, shown: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert cards_here() == (A40,) * count


def test_parts_of_a_gpu_in_mig_mode_are_devices(machine: Machine) -> None:
    first = machine.gpus[0]
    first.unsupported &= ~NO_MIG
    first.mig_enabled, first.mig_devices, first.mig_sms = 1, 2, 14
    found = cards_here()
    assert len(found) == 3
    assert found[0].memory_bytes < 48 << 30


def test_none_where_the_driver_does_not_answer(machine: Machine) -> None:
    machine.fail_to_open(9)
    assert cards_here() == ()
