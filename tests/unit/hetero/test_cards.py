"""The GPUs that engines may use, by the real nvidia-ml-py on the stand-in."""

import pytest

from hetero.cards import Card, cards_here
from hetero.nvml import Nvml
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


def test_of_a_gpu_in_mig_mode_the_first_device_is_shown_and_others_by_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.gpus[0]
    first.unsupported &= ~NO_MIG
    first.mig_enabled, first.mig_devices, first.mig_sms = 1, 2, 14
    (part,) = cards_here()
    assert part.memory_bytes < 48 << 30
    for shown, seen in (("0", (part,)), ("0,1", (part,)), ("1", (A40,))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert cards_here() == seen
    with Nvml() as nvml:
        parts = nvml.inventory()[0].mig_devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(one.uuid for one in parts))
    assert cards_here() == (part, part)


def test_none_where_the_driver_does_not_answer(machine: Machine) -> None:
    machine.fail_to_open(9)
    assert cards_here() == ()
