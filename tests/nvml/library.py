"""NVIDIA's management library for machines without a GPU: it answers about stand-in GPUs.

The real ``nvidia-ml-py`` opens it through `ctypes`, by the name of NVIDIA's, and calls it with what
it would give NVIDIA's: each function writes where its arguments point, and returns an error's code.
It is written in Python, so that tests need no compiler.
"""

import contextlib
import ctypes
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.at_start import FOLDER
from tests.nvml import standin
from tests.nvml.standin import Machine, StandInGpu

NAME = "libnvidia-ml.so.1"

_OK, _UNINITIALIZED, _INVALID, _UNSUPPORTED, _DENIED, _NOT_FOUND = 0, 1, 2, 3, 4, 6
_TOO_SMALL, _NO_LIBRARY, _LOST = 7, 12, 15


class _Refused(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Session:
    """The state of the library between its initialization and the next one."""

    def __init__(self, file: Path) -> None:
        self.machine = Machine(file)
        self._file = file.open("rb")
        # The file's lock keeps processes apart, this one threads.
        self._threads = threading.RLock()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from changing the machine meanwhile."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


_exports = SimpleNamespace()
_session: _Session | None = None


def load_here() -> None:
    """Have whatever asks `ctypes` for NVIDIA's library in this process get the stand-in."""
    # The process that holds power caps is started with the path of its parent, not with PYTHONPATH.
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    ctypes.CDLL.__new__ = staticmethod(_open)  # type: ignore[method-assign, assignment]


def _open(kind: type, name: str | None = None, *_: Any, **__: Any) -> Any:
    return _exports if name == NAME else object.__new__(kind)


def _refuse(code: int) -> NoReturn:
    raise _Refused(code)


def _opened() -> _Session:
    return _session or _refuse(_UNINITIALIZED)


def _exported(function: Callable[..., None]) -> Callable[..., None]:
    """Have the library offer a function, which is given what pointers point to."""

    def called(*arguments: Any) -> int:
        try:
            function(*(getattr(one, "_obj", one) for one in arguments))
        except _Refused as refused:
            return refused.code
        return _OK

    setattr(_exports, function.__name__, called)
    return function


def _of_device(
    *, whole: bool = False, needs: int = 0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have the library offer a function of a device.

    It is given the GPU, and the number of its MIG device (-1: the GPU itself).

    Args:
        whole: refuse MIG devices.
        needs: refuse GPUs that do not support this.
    """

    def export(function: Callable[..., None]) -> Callable[..., None]:
        def called(device: Any, *arguments: Any) -> None:
            with _opened().alone():
                gpu, mig = _find(device)
                if gpu.lost:
                    _refuse(_LOST)
                if (whole and mig >= 0) or gpu.unsupported & needs:
                    _refuse(_UNSUPPORTED)
                function(gpu, mig, *arguments)

        called.__name__ = function.__name__
        return _exported(called)

    return export


# A handle is a pointer to 1000 * (GPU + 1), plus MIG device + 1.
def _point(device: Any, gpu: int, mig: int = -1) -> None:
    ctypes.c_void_p.from_buffer(device).value = 1000 * (gpu + 1) + mig + 1


def _find(device: Any) -> tuple[StandInGpu, int]:
    gpus = _opened().machine.gpus
    place, mig = divmod(ctypes.c_void_p.from_buffer(device).value or 0, 1000)
    return (gpus[place - 1], mig - 1) if 1 <= place <= len(gpus) else _refuse(_INVALID)


def _index(gpu: StandInGpu) -> int:
    return [one.uuid for one in _opened().machine.gpus].index(gpu.uuid)


def _write(buffer: Any, length: Any, text: bytes) -> None:
    if len(text) >= length.value:
        _refuse(_TOO_SMALL)
    buffer.value = text


@_exported
def nvmlInitWithFlags(flags: Any) -> None:
    global _session
    path = os.environ.get(standin.VARIABLE)
    if path is None or not os.path.exists(path):
        _refuse(_NO_LIBRARY)
    _session = _Session(Path(path))
    if _session.machine.state.init_error:
        _refuse(_session.machine.state.init_error)


@_exported
def nvmlInit_v2() -> None:
    nvmlInitWithFlags(0)


@_exported
def nvmlShutdown() -> None:
    _opened()


def nvmlErrorString(code: int) -> bytes:
    return b"stand-in error %d" % code


_exports.nvmlErrorString = nvmlErrorString


@_exported
def nvmlSystemGetDriverVersion(text: Any, length: Any) -> None:
    _write(text, length, _opened().machine.state.driver)


@_exported
def nvmlSystemGetNVMLVersion(text: Any, length: Any) -> None:
    _write(text, length, b"12." + _opened().machine.state.driver)


@_exported
def nvmlSystemGetCudaDriverVersion_v2(version: Any) -> None:
    version.value = _opened().machine.state.cuda


@_exported
def nvmlDeviceGetCount_v2(count: Any) -> None:
    count.value = len(_opened().machine.gpus)


@_exported
def nvmlDeviceGetHandleByIndex_v2(index: Any, device: Any) -> None:
    if index.value >= len(_opened().machine.gpus):
        _refuse(_INVALID)
    _point(device, index.value)


def _mig_uuid(gpu: StandInGpu, mig: int) -> bytes:
    return b"MIG-%d-%s" % (mig, gpu.uuid)


@_exported
def nvmlDeviceGetHandleByUUID(uuid: Any, device: Any) -> None:
    for index, gpu in enumerate(_opened().machine.gpus):
        if gpu.uuid == uuid.value:
            if gpu.lost:
                _refuse(_LOST)
            _point(device, index)
            return
        for mig in range(gpu.mig_devices if gpu.mig_enabled else 0):
            if _mig_uuid(gpu, mig) == uuid.value:
                _point(device, index, mig)
                return
    _refuse(_NOT_FOUND)


@_of_device()
def nvmlDeviceGetName(gpu: StandInGpu, mig: int, text: Any, length: Any) -> None:
    _write(text, length, gpu.name if mig < 0 else gpu.name + b" MIG")


@_of_device()
def nvmlDeviceGetUUID(gpu: StandInGpu, mig: int, text: Any, length: Any) -> None:
    _write(text, length, gpu.uuid if mig < 0 else _mig_uuid(gpu, mig))


@_of_device()
def nvmlDeviceGetMemoryInfo_v2(gpu: StandInGpu, mig: int, memory: Any) -> None:
    memory.total = gpu.memory_bytes if mig < 0 else gpu.memory_bytes // gpu.mig_devices
    memory.used, memory.reserved = gpu.used_bytes, gpu.reserved_bytes
    memory.free = memory.total - gpu.used_bytes - gpu.reserved_bytes


@_of_device()
def nvmlDeviceGetCudaComputeCapability(gpu: StandInGpu, mig: int, major: Any, minor: Any) -> None:
    major.value, minor.value = gpu.major, gpu.minor


@_of_device(needs=standin.NO_CORES)
def nvmlDeviceGetNumGpuCores(gpu: StandInGpu, mig: int, cores: Any) -> None:
    cores.value = gpu.cores


@_of_device(whole=True, needs=standin.NO_POWER)
def nvmlDeviceGetPowerUsage(gpu: StandInGpu, mig: int, milliwatts: Any) -> None:
    milliwatts.value = gpu.draw_mw


@_of_device(whole=True, needs=standin.NO_POWER)
def nvmlDeviceGetPowerManagementLimit(gpu: StandInGpu, mig: int, milliwatts: Any) -> None:
    milliwatts.value = gpu.limit_mw


@_of_device(needs=standin.NO_POWER)
def nvmlDeviceGetPowerManagementDefaultLimit(gpu: StandInGpu, mig: int, milliwatts: Any) -> None:
    milliwatts.value = gpu.default_mw


@_of_device(whole=True, needs=standin.NO_POWER)
def nvmlDeviceGetPowerManagementLimitConstraints(
    gpu: StandInGpu, mig: int, low: Any, high: Any
) -> None:
    low.value, high.value = gpu.min_mw, gpu.max_mw


@_of_device(whole=True)
def nvmlDeviceSetPowerManagementLimit(gpu: StandInGpu, mig: int, milliwatts: Any) -> None:
    gpu.set_calls += 1
    if gpu.unsupported & standin.NO_POWER:
        _refuse(_UNSUPPORTED)
    if gpu.denied:
        _refuse(_DENIED)
    if gpu.fail_set:
        _refuse(gpu.fail_set)
    if not gpu.min_mw <= milliwatts.value <= gpu.max_mw:
        _refuse(_INVALID)
    _opened().machine.settle()
    gpu.limit_mw = milliwatts.value


@_of_device(whole=True, needs=standin.NO_ENERGY)
def nvmlDeviceGetTotalEnergyConsumption(gpu: StandInGpu, mig: int, millijoules: Any) -> None:
    _opened().machine.settle()
    millijoules.value = gpu.energy_uj // 1000


@_of_device(needs=standin.NO_UTILISATION)
def nvmlDeviceGetUtilizationRates(gpu: StandInGpu, mig: int, rates: Any) -> None:
    if gpu.mig_enabled:
        _refuse(_UNSUPPORTED)
    rates.gpu, rates.memory = gpu.utilisation, 0


@_of_device()
def nvmlDeviceGetTemperature(gpu: StandInGpu, mig: int, sensor: Any, celsius: Any) -> None:
    celsius.value = gpu.temperature


@_of_device()
def nvmlDeviceGetComputeRunningProcesses_v3(
    gpu: StandInGpu, mig: int, count: Any, processes: Any
) -> None:
    room, count.value = count.value, gpu.processes
    if room < gpu.processes:
        _refuse(_TOO_SMALL)
    for place in range(gpu.processes):
        one = processes[place]
        one.pid, one.usedGpuMemory = gpu.pids[place], gpu.process_bytes[place]
        one.gpuInstanceId = one.computeInstanceId = 0xFFFFFFFF


@_of_device(needs=standin.NO_MIG)
def nvmlDeviceGetMigMode(gpu: StandInGpu, mig: int, current: Any, pending: Any) -> None:
    current.value = pending.value = gpu.mig_enabled


@_of_device()
def nvmlDeviceGetMaxMigDeviceCount(gpu: StandInGpu, mig: int, count: Any) -> None:
    count.value = 7


@_of_device()
def nvmlDeviceGetMigDeviceHandleByIndex(gpu: StandInGpu, mig: int, index: Any, device: Any) -> None:
    if index.value >= gpu.mig_devices:
        _refuse(_NOT_FOUND)
    _point(device, _index(gpu), index.value)


@_of_device()
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu: StandInGpu, mig: int, device: Any) -> None:
    if mig < 0:
        _refuse(_INVALID)
    _point(device, _index(gpu))


@_of_device()
def nvmlDeviceGetAttributes_v2(gpu: StandInGpu, mig: int, attributes: Any) -> None:
    if mig < 0:
        _refuse(_UNSUPPORTED)
    attributes.multiprocessorCount = gpu.mig_sms
    attributes.memorySizeMB = gpu.memory_bytes // gpu.mig_devices >> 20
