"""NVIDIA's management library, behind one door: everything ConServe asks a GPU goes through here.

Over ``nvidia-ml-py`` (NVML API reference, https://docs.nvidia.com/deploy/nvml-api/). Units are
ConServe's (watts, joules, bytes), not NVML's. Every failure is one of a few errors whose message
an operator can act on; what a GPU merely does not offer is None where it describes the GPU, and
`NotSupported` where it is asked for by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import pynvml

_T = TypeVar("_T")


class NvmlError(RuntimeError):
    """NVML failed; the message says what to do. Raised as such where no subclass fits."""


class NoDriver(NvmlError):
    """No NVIDIA driver is to be found, or not one that fits its library."""


class NoPermission(NvmlError):
    """The driver does not let this process change that, or not even read it."""


class NotSupported(NvmlError):
    """This GPU, or this driver, does not offer that."""


class GpuLost(NvmlError):
    """The GPU does not answer any more."""


class UnknownGpu(NvmlError):
    """No GPU of this machine has that UUID."""


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A MIG device: a part of a GPU with SMs and memory of its own.

    Power, energy and temperature are those of the whole GPU: ask for its ``parent_uuid``.
    """

    uuid: str
    parent_uuid: str
    name: str
    sm_count: int | None
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """Tells what a GPU is.

    Attributes:
        index: the GPU's number for NVML, in PCI bus order; CUDA's may differ
            (``CUDA_DEVICE_ORDER=PCI_BUS_ID``).
        sm_count: streaming multiprocessors; None where the driver or this module cannot tell.
        compute_capability: its major and its minor number.
        mig_enabled: whether it is in MIG mode; None where it has no such mode.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    sm_count: int | None
    compute_capability: tuple[int, int]
    mig_enabled: bool | None
    mig_devices: tuple[MigDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerReading:
    """A GPU's power limit and its bounds; ``draw_w`` is what the whole board draws now."""

    draw_w: float
    limit_w: float
    default_w: float
    min_w: float
    max_w: float


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a CUDA context on a GPU; memory is None where the driver does not say."""

    pid: int
    memory_bytes: int | None


class Nvml:
    """An open session with the driver; a context manager.

    A session is for one thread at a time. Handles are looked up anew after a GPU was lost, so
    that one that is back (after a reset, say) is found again.

    Raises:
        NoDriver, NoPermission, NvmlError: it cannot be opened.
    """

    def __init__(self) -> None:
        _call(pynvml.nvmlInit, "opening NVML")
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session."""
        self._handles.clear()
        _call(pynvml.nvmlShutdown, "closing NVML")

    def driver_version(self) -> str:
        """The driver's version, as ``nvidia-smi`` shows it."""
        return str(_call(pynvml.nvmlSystemGetDriverVersion, "reading the driver's version"))

    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver can run, as major and minor number."""
        number = int(_call(pynvml.nvmlSystemGetCudaDriverVersion_v2, "reading CUDA's version"))
        return number // 1000, number % 1000 // 10

    # --- what there is -----------------------------------------------------------------------

    def inventory(self) -> list[Gpu]:
        """Every GPU that answers; one that fell off the bus is left out (`lost` counts those)."""
        found = []
        for index in range(self._count()):
            try:
                found.append(self._gpu(index))
            except GpuLost:
                continue
        return found

    def lost(self) -> list[int]:
        """Indices of the GPUs that the driver lists but that do not answer."""
        gone = []
        for index in range(self._count()):
            try:
                handle = _call(pynvml.nvmlDeviceGetHandleByIndex, f"GPU {index}", index)
                _call(pynvml.nvmlDeviceGetUUID, f"GPU {index}", handle)
                _call(pynvml.nvmlDeviceGetMemoryInfo, f"GPU {index}", handle)
            except GpuLost:
                gone.append(index)
        return gone

    def parent_uuid(self, uuid: str) -> str:
        """The whole GPU that a MIG device is a part of; of a whole GPU, itself."""
        if not uuid.startswith("MIG-"):
            return uuid
        handle = self._handle(uuid)
        parent = self._ask(uuid, pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        return str(self._ask(uuid, pynvml.nvmlDeviceGetUUID, parent))

    # --- what it does now --------------------------------------------------------------------

    def power(self, uuid: str) -> PowerReading:
        """Draw, limit, default limit and the bounds of the limit."""
        handle = self._handle(uuid)
        low, high = self._ask(uuid, pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
        limit = self._ask(uuid, pynvml.nvmlDeviceGetPowerManagementLimit, handle)
        default = self._ask(uuid, pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
        return PowerReading(self.draw_w(uuid), limit / 1e3, default / 1e3, low / 1e3, high / 1e3)

    def draw_w(self, uuid: str) -> float:
        """The whole board's power; on Ampere and later the mean of the last second."""
        milliwatts = self._ask(uuid, pynvml.nvmlDeviceGetPowerUsage, self._handle(uuid))
        return float(milliwatts) / 1e3

    def limit_w(self, uuid: str) -> float:
        """The power limit that is set."""
        milliwatts = self._ask(uuid, pynvml.nvmlDeviceGetPowerManagementLimit, self._handle(uuid))
        return float(milliwatts) / 1e3

    def set_limit_w(self, uuid: str, limit_w: float) -> None:
        """Change the power limit. `hetero.power` alone calls this, which records the old one.

        Raises:
            NoPermission: this process may not.
        """
        milliwatts = round(limit_w * 1e3)
        handle = self._handle(uuid)
        self._ask(uuid, pynvml.nvmlDeviceSetPowerManagementLimit, handle, milliwatts)

    def energy_j(self, uuid: str) -> float:
        """Return what the GPU has used since the driver was loaded.

        Raises:
            NotSupported: it does not count (those before Volta); integrate `draw_w` instead.
        """
        handle = self._handle(uuid)
        return float(self._ask(uuid, pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)) / 1e3

    def utilisation(self, uuid: str) -> float:
        """The share of the last sample period in which a kernel ran, from 0 to 1."""
        rates = self._ask(uuid, pynvml.nvmlDeviceGetUtilizationRates, self._handle(uuid))
        return float(rates.gpu) / 100

    def temperature_c(self, uuid: str) -> int:
        """The chip's temperature, in degrees Celsius."""
        handle = self._handle(uuid)
        sensor = pynvml.NVML_TEMPERATURE_GPU
        return int(self._ask(uuid, pynvml.nvmlDeviceGetTemperature, handle, sensor))

    def memory_used_bytes(self, uuid: str) -> int:
        """Memory that is taken, by whichever process."""
        return int(self._ask(uuid, pynvml.nvmlDeviceGetMemoryInfo, self._handle(uuid)).used)

    def memory_free_bytes(self, uuid: str) -> int:
        """Memory that nobody has."""
        return int(self._ask(uuid, pynvml.nvmlDeviceGetMemoryInfo, self._handle(uuid)).free)

    def processes(self, uuid: str) -> list[GpuProcess]:
        """Processes with a CUDA context on it, by their ids outside of containers."""
        handle = self._handle(uuid)
        running = self._ask(uuid, pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
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
        memory = self._ask(uuid, pynvml.nvmlDeviceGetMemoryInfo, handle)
        mode = self._if_supported(uuid, pynvml.nvmlDeviceGetMigMode, handle)
        enabled = None if mode is None else mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        return Gpu(
            index=index,
            uuid=uuid,
            name=str(self._ask(uuid, pynvml.nvmlDeviceGetName, handle)),
            memory_bytes=int(memory.total),
            sm_count=self._sm_count(uuid, handle, (major, minor)),
            compute_capability=(major, minor),
            mig_enabled=enabled,
            mig_devices=self._mig_devices(uuid, handle) if enabled else (),
        )

    def _sm_count(self, uuid: str, handle: Any, capability: tuple[int, int]) -> int | None:
        """NVML counts the SMs of MIG devices alone; of a whole GPU it counts cores."""
        cores = self._if_supported(uuid, pynvml.nvmlDeviceGetNumGpuCores, handle)
        each = _CORES_PER_SM.get(capability)
        return None if cores is None or each is None or cores % each else cores // each

    def _mig_devices(self, uuid: str, handle: Any) -> tuple[MigDevice, ...]:
        found = []
        for index in range(self._ask(uuid, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
            try:
                part = self._ask(uuid, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            except UnknownGpu:
                continue  # Places that no instance has been made in.
            attributes = self._if_supported(uuid, pynvml.nvmlDeviceGetAttributes_v2, part)
            memory = self._ask(uuid, pynvml.nvmlDeviceGetMemoryInfo, part)
            found.append(
                MigDevice(
                    uuid=str(self._ask(uuid, pynvml.nvmlDeviceGetUUID, part)),
                    parent_uuid=uuid,
                    name=str(self._ask(uuid, pynvml.nvmlDeviceGetName, part)),
                    sm_count=None if attributes is None else int(attributes.multiprocessorCount),
                    memory_bytes=int(memory.total),
                )
            )
        return tuple(found)

    def _handle(self, uuid: str) -> Any:
        handle = self._handles.get(uuid)
        if handle is None:
            handle = _call(pynvml.nvmlDeviceGetHandleByUUID, uuid, uuid)
            self._handles[uuid] = handle
        return handle

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


# FP32 cores of an SM by compute capability: "Arithmetic Instructions" in the CUDA C++ Programming
# Guide.
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


def _call(function: Callable[..., _T], what: str, *arguments: Any) -> _T:
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        kind, advice = _MESSAGES.get(
            error.value, (NvmlError, f"NVML says {error}; see the kernel's log (`dmesg`)")
        )
        raise kind(f"{what}: {advice}") from error
