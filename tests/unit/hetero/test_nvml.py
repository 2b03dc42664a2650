"""The NVML layer, through the real nvidia-ml-py, against a stand-in library."""

import pytest

from hetero.nvml import GpuLost, NoDriver, NoPermission, NotSupported, Nvml, NvmlError, UnknownGpu
from tests.nvml import standin
from tests.nvml.standin import Machine


def test_the_inventory_says_what_each_gpu_is(machine: Machine, nvml: Nvml) -> None:
    first, second = nvml.inventory()
    assert (first.index, second.index) == (0, 1)
    assert first.uuid == machine.gpus[0].id
    assert second.uuid == machine.gpus[1].id
    assert first.name == "NVIDIA A40"
    assert first.memory_bytes == 48 << 30
    assert first.sm_count == 84  # 10,752 cores, 128 an SM.
    assert first.compute_capability == (8, 6)
    assert first.mig_enabled is None
    assert nvml.driver_version() == "550.54.15"
    assert nvml.cuda_version() == (12, 4)


def test_memory_that_the_driver_keeps_is_no_engines(machine: Machine) -> None:
    """CUDA's total lacks it, by half a GiB on an H100."""
    gpu = machine.gpus[0]
    gpu.used_bytes, gpu.reserved_bytes = 3 << 30, 1 << 30
    with Nvml() as nvml:
        first = nvml.inventory()[0]
        assert first.memory_bytes == 47 << 30
        assert nvml.memory_used_bytes(first.uuid) == 3 << 30
        assert nvml.memory_free_bytes(first.uuid) == 44 << 30


@pytest.mark.parametrize(
    ("cores", "capability", "sms"),
    [(16896, (9, 0), 132), (6912, (8, 0), 108), (16384, (99, 0), None), (100, (8, 6), None)],
)
def test_sms_are_counted_where_that_can_be_told(
    machine: Machine, nvml: Nvml, cores: int, capability: tuple[int, int], sms: int | None
) -> None:
    gpu = machine.gpus[0]
    gpu.cores, (gpu.major, gpu.minor) = cores, capability
    assert nvml.inventory()[0].sm_count == sms
    gpu.unsupported |= standin.NO_CORES
    assert nvml.inventory()[0].sm_count is None


def test_mig_devices_belong_to_their_gpu(machine: Machine, nvml: Nvml) -> None:
    gpu = machine.gpus[1]
    gpu.unsupported &= ~standin.NO_MIG
    assert nvml.inventory()[1].mig_enabled is False
    gpu.mig_enabled, gpu.mig_devices, gpu.mig_sms = 1, 3, 28
    whole = nvml.inventory()[1]
    assert whole.mig_enabled is True
    assert [part.sm_count for part in whole.mig_devices] == [28, 28, 28]
    assert sum(part.memory_bytes for part in whole.mig_devices) == whole.memory_bytes
    last = whole.mig_devices[2].uuid
    with pytest.raises(NotSupported):
        nvml.draw_w(last)
    with pytest.raises(NotSupported):
        nvml.utilisation(whole.uuid)


def test_it_says_what_a_gpu_does(machine: Machine, nvml: Nvml) -> None:
    gpu = machine.gpus[0]
    gpu.utilisation, gpu.temperature, gpu.used_bytes = 73, 61, 5 << 30
    gpu.run(4242, 4243)
    assert nvml.utilisation(gpu.id) == 0.73
    assert nvml.temperature_c(gpu.id) == 61
    assert nvml.memory_used_bytes(gpu.id) == 5 << 30
    assert [one.pid for one in nvml.processes(gpu.id)] == [4242, 4243]
    assert nvml.processes(machine.gpus[1].id) == []


def test_a_gpu_that_falls_off_the_bus_is_lost_and_may_come_back(
    machine: Machine, nvml: Nvml
) -> None:
    gpu = machine.gpus[0]
    assert nvml.lost() == []
    nvml.draw_w(gpu.id)
    gpu.lost = 1
    with pytest.raises(GpuLost, match="dmesg"):
        nvml.draw_w(gpu.id)
    assert [one.index for one in nvml.inventory()] == [1]
    assert nvml.lost() == [0]
    gpu.lost = 0
    assert nvml.draw_w(gpu.id) == 30


def test_an_unknown_gpu_is_refused(nvml: Nvml) -> None:
    with pytest.raises(UnknownGpu, match="GPU-nonsense"):
        nvml.draw_w("GPU-nonsense")


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (9, NoDriver, "install it"),
        (18, NoDriver, "reboot"),
        (4, NoPermission, "/dev/nvidia"),
        (999, NvmlError, "NVML says"),
    ],
)
def test_a_driver_that_does_not_open_says_why(
    machine: Machine, code: int, kind: type[NvmlError], advice: str
) -> None:
    machine.fail_to_open(code)
    with pytest.raises(NvmlError, match=advice) as caught:
        Nvml()
    assert type(caught.value) is kind
