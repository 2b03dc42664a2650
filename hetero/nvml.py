"""Wraps NVIDIA's management library, ``nvidia-ml-py``, for all that ConServe asks a GPU.

Units are watts, joules and bytes. Error messages say what an operator can do. A property that a
GPU does not offer is None in its description, and raises `NotSupported` if it is asked for alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import pynvml

_T = TypeVar("_T")


class NvmlError(RuntimeError):
    """NVML failed; the message says what to do."""


class NoDriver(NvmlError):
    """There is no NVIDIA driver, or it does not match its library."""


class NoPermission(NvmlError):
    """The driver does not let this process change or read that."""


class NotSupported(NvmlError):
    """This GPU, or this driver, does not offer that."""


class GpuLost(NvmlError):
    """The GPU no longer answers."""


class UnknownGpu(NvmlError):
    """No GPU of this machine has that UUID."""


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A part of a GPU with its own SMs and memory. Power and temperature are its parent's."""

    uuid: str
    name: str
    sm_count: int | None
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; ``index`` is in PCI bus order, and CUDA's may differ."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    sm_count: int | None
    compute_capability: tuple[int, int]
    mig_enabled: bool | None  # None: it has no such mode.
    mig_devices: tuple[MigDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """A GPU's default power limit, and the bounds of what it may be set to."""

    default_w: float
    min_w: float
    max_w: float


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a CUDA context on a GPU; its memory is None if the driver does not say."""

    pid: int
    memory_bytes: int | None


class Nvml:
    """A session with the driver, for one thread at a time; raises `NvmlError`.

    Handles are looked up again after a GPU was lost, so that it is found after a reset.
    """

    def __init__(self) -> None:
        _call(pynvml.nvmlInit, "opening NVML")
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._handles.clear()
        _call(pynvml.nvmlShutdown, "closing NVML")

    def driver_version(self) -> str:
        return str(_call(pynvml.nvmlSystemGetDriverVersion, "reading the driver's version"))

    def cuda_version(self) -> tuple[int, int]:
        number = int(_call(pynvml.nvmlSystemGetCudaDriverVersion_v2, "reading CUDA's version"))
        return number // 1000, number % 1000 // 10

    # --- what there is -----------------------------------------------------------------------

    def inventory(self) -> list[Gpu]:
        """Return every GPU that answers; `lost` returns the others."""
        found = []
        for index in range(self._count()):
            try:
                found.append(self._gpu(index))
            except GpuLost:
                continue
        return found

    def lost(self) -> list[int]:
        found = {gpu.index for gpu in self.inventory()}
        return [index for index in range(self._count()) if index not in found]

    # --- what it does now --------------------------------------------------------------------

    def limits(self, uuid: str) -> PowerLimits:
        low, high = self._of(uuid, pynvml.nvmlDeviceGetPowerManagementLimitConstraints)
        default = self._of(uuid, pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
        return PowerLimits(default / 1e3, low / 1e3, high / 1e3)

    def draw_w(self, uuid: str) -> float:
        """Return the whole board's power; from Ampere on, the mean of the last second."""
        return float(self._of(uuid, pynvml.nvmlDeviceGetPowerUsage)) / 1e3

    def limit_w(self, uuid: str) -> float:
        return float(self._of(uuid, pynvml.nvmlDeviceGetPowerManagementLimit)) / 1e3

    def set_limit_w(self, uuid: str, limit_w: float) -> None:
        """Set the power limit. Only `hetero.power` calls this, which records the old one."""
        self._of(uuid, pynvml.nvmlDeviceSetPowerManagementLimit, round(limit_w * 1e3))

    def energy_j(self, uuid: str) -> float:
        """Return the energy since the driver was loaded; GPUs before Volta raise `NotSupported`."""
        return float(self._of(uuid, pynvml.nvmlDeviceGetTotalEnergyConsumption)) / 1e3

    def utilisation(self, uuid: str) -> float:
        """Return the share (0 to 1) of the last sample period in which a kernel ran."""
        return float(self._of(uuid, pynvml.nvmlDeviceGetUtilizationRates).gpu) / 100

    def temperature_c(self, uuid: str) -> int:
        kind = pynvml.NVML_TEMPERATURE_GPU
        return int(self._of(uuid, pynvml.nvmlDeviceGetTemperature, kind))

    def memory_used_bytes(self, uuid: str) -> int:
        return int(self._of(uuid, _memory).used)

    def memory_free_bytes(self, uuid: str) -> int:
        return int(self._of(uuid, _memory).free)

    def processes(self, uuid: str) -> list[GpuProcess]:
        running = self._of(uuid, pynvml.nvmlDeviceGetComputeRunningProcesses)
        return [
            GpuProcess(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory))
            for one in running
        ]

    # --- inside ------------------------------------------------------------------------------

    def _count(self) -> int:
        return int(_call(pynvml.nvmlDeviceGetCount, "counting GPUs"))

    def _gpu(self, index: int) -> Gpu:
        what = f"GPU {index}"
        handle = _call(pynvml.nvmlDeviceGetHandleByIndex, what, index)
        uuid = str(_call(pynvml.nvmlDeviceGetUUID, what, handle))
        major, minor = self._ask(uuid, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        memory = self._ask(uuid, _memory, handle)
        mode = self._if_supported(uuid, pynvml.nvmlDeviceGetMigMode, handle)
        enabled = None if mode is None else mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        return Gpu(
            index=index,
            uuid=uuid,
            name=str(self._ask(uuid, pynvml.nvmlDeviceGetName, handle)),
            memory_bytes=int(memory.total - memory.reserved),
            sm_count=self._sm_count(uuid, handle, (major, minor)),
            compute_capability=(major, minor),
            mig_enabled=enabled,
            mig_devices=self._mig_devices(uuid, handle) if enabled else (),
        )

    def _sm_count(self, uuid: str, handle: Any, capability: tuple[int, int]) -> int | None:
        """NVML counts SMs only of MIG devices; for a whole GPU it counts cores."""
        cores = self._if_supported(uuid, pynvml.nvmlDeviceGetNumGpuCores, handle)
        each = _CORES_PER_SM.get(capability)
        return None if cores is None or each is None or cores % each else cores // each

    def _mig_devices(self, uuid: str, handle: Any) -> tuple[MigDevice, ...]:
        found = []
        for index in range(self._ask(uuid, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
            try:
                part = self._ask(uuid, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            except UnknownGpu:
                continue  # No instance was made at this index.
            attributes = self._if_supported(uuid, pynvml.nvmlDeviceGetAttributes_v2, part)
            memory = self._ask(uuid, _memory, part)
            found.append(
                MigDevice(
                    uuid=str(self._ask(uuid, pynvml.nvmlDeviceGetUUID, part)),
                    name=str(self._ask(uuid, pynvml.nvmlDeviceGetName, part)),
                    sm_count=None if attributes is None else int(attributes.multiprocessorCount),
                    memory_bytes=int(memory.total - memory.reserved),
                )
            )
        return tuple(found)

    def _of(self, uuid: str, function: Callable[..., _T], *arguments: Any) -> _T:
        if uuid not in self._handles:
            self._handles[uuid] = _call(pynvml.nvmlDeviceGetHandleByUUID, uuid, uuid)
        return self._ask(uuid, function, self._handles[uuid], *arguments)

    def _ask(self, uuid: str, function: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return _call(function, uuid, *arguments)
        except GpuLost:
            self._handles.pop(uuid, None)
            raise

    def _if_supported(self, uuid: str, function: Callable[..., _T], *arguments: Any) -> _T | None:
        try:
            return self._ask(uuid, function, *arguments)
        except NotSupported:
            return None


# FP32 cores per SM by compute capability ("Arithmetic Instructions", CUDA C++ Programming Guide).
_CORES_PER_SM = {
    (6, 0): 64, (6, 1): 128, (6, 2): 128, (7, 0): 64, (7, 2): 64, (7, 5): 64,
    (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128,
    (10, 0): 128, (10, 3): 128, (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip

_NO_DRIVER = (
    "no NVIDIA driver here: install it, load its module (`nvidia-smi` then lists the GPUs), and "
    "give a container the GPUs and the `utility` capability (NVIDIA_DRIVER_CAPABILITIES)"
)
_MESSAGES: dict[int, tuple[type[NvmlError], str]] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (NoDriver, _NO_DRIVER),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (NoDriver, _NO_DRIVER),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        NoDriver,
        "the NVIDIA library and the loaded kernel module are of different versions: reboot, or "
        "reload the module after the driver's update",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        NoPermission,
        "not permitted: changing a GPU's power limit needs root or the capability CAP_SYS_ADMIN "
        "(container: `--cap-add SYS_ADMIN`), or let a privileged service set it; reading needs "
        "access to /dev/nvidia*",
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (NotSupported, "this GPU does not offer that"),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (
        NotSupported,
        "this driver is too old to offer that: update it",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        GpuLost,
        "the GPU has fallen off the bus: look for Xid errors in the kernel's log (`dmesg`), "
        "then reboot, or reset the GPU",
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: (GpuLost, "the GPU needs a reset: `nvidia-smi --gpu-reset`"),
    pynvml.NVML_ERROR_NOT_FOUND: (UnknownGpu, "no such GPU; `nvidia-smi -L` lists them"),
    pynvml.NVML_ERROR_GPU_NOT_FOUND: (UnknownGpu, "no such GPU; `nvidia-smi -L` lists them"),
}


def _memory(handle: Any) -> Any:
    """Return the total, used and free bytes, and those that the driver reserves: CUDA has none."""
    return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)


def _call(function: Callable[..., _T], what: str, *arguments: Any) -> _T:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        kind, advice = _MESSAGES.get(
            error.value, (NvmlError, f"NVML says {error}; see the kernel's log (`dmesg`)")
        )
        raise kind(f"{what}: {advice}") from error
