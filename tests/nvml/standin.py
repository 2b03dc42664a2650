"""GPUs for machines without one, in a file that every process maps.

So several processes see the same GPUs, and a test can move time, power and faults. A GPU draws what
its load asks for, but no more than its limit; its energy counter is the integral of that.
`tests.nvml.library` answers about them as NVIDIA's library would.
"""

import ctypes
import mmap
import os
import time
from pathlib import Path

from tests.at_start import FOLDER

VARIABLE = "CONSERVE_STANDIN_NVML"

NO_ENERGY, NO_MIG, NO_CORES, NO_POWER, NO_UTILISATION = 1, 2, 4, 8, 16

_INTEGERS = (
    "load_mw", "limit_mw", "default_mw", "min_mw", "max_mw", "energy_uj", "settled_us",
    "memory_bytes", "used_bytes", "reserved_bytes", "cores", "major", "minor", "utilisation",
    "temperature", "mig_enabled", "mig_devices", "mig_sms", "lost", "denied", "unsupported",
    "set_calls", "fail_set", "processes",
)  # fmt: skip


class StandInGpu(ctypes.Structure):
    """One GPU, as it lies in the file; writing a field is seen by every process.

    ``load_mw`` is what its work would draw without a limit.
    """

    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 96),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("pids", ctypes.c_int64 * 8),
        ("process_bytes", ctypes.c_int64 * 8),
    )

    @property
    def id(self) -> str:
        return str(self.uuid.decode())

    @property
    def draw_mw(self) -> int:
        return int(min(self.load_mw, self.limit_mw))

    def run(self, *pids: int, memory_bytes: int = 1 << 30) -> None:
        """Have these processes on it, each with so much memory; `used_bytes` is not changed."""
        for place, pid in enumerate(pids):
            self.pids[place] = pid
            self.process_bytes[place] = memory_bytes
        self.processes = len(pids)

    def be_an_h100(self) -> None:
        """132 SMs of compute capability 9.0, 80 GiB, and MIG, which is off."""
        self.name = b"NVIDIA H100 80GB HBM3"
        self.memory_bytes = 80 << 30
        self.cores, self.major, self.minor = 132 * 128, 9, 0
        self.limit_mw = self.default_mw = self.max_mw = 700_000
        self.min_mw = 200_000
        self.unsupported = 0


class _State(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("real_time", ctypes.c_int64),
        ("now_us", ctypes.c_int64),
        ("init_error", ctypes.c_int64),
        ("cuda", ctypes.c_int64),
        ("driver", ctypes.c_char * 32),
        ("gpus", StandInGpu * 8),
    )


class Machine:
    """A machine with stand-in GPUs, in a file.

    Args:
        file: made if it is not there.
        gpus: how many A40s (300 W, 100 to 300 W; 84 SMs), idle at 30 W.
        real_time: energy counters follow the clock; else `advance` moves time.
    """

    def __init__(self, file: Path, gpus: int = 2, real_time: bool = False) -> None:
        fresh = not file.exists()
        if fresh:
            file.write_bytes(bytes(ctypes.sizeof(_State)))
        self.file = file
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), ctypes.sizeof(_State))
        self.state = _State.from_buffer(self._mapped)
        if fresh:
            self.state.count = gpus
            self.state.real_time = int(real_time)
            self.have_driver("550.54.15", (12, 4))
            for index in range(gpus):
                self._make(self.state.gpus[index], index)

    def _make(self, gpu: StandInGpu, index: int) -> None:
        gpu.name = b"NVIDIA A40"
        gpu.uuid = f"GPU-00000000-0000-0000-0000-{index:012d}".encode()
        gpu.load_mw, gpu.limit_mw, gpu.default_mw = 30_000, 300_000, 300_000
        gpu.min_mw, gpu.max_mw = 100_000, 300_000
        gpu.memory_bytes = 48 << 30
        gpu.cores, gpu.major, gpu.minor = 10752, 8, 6
        gpu.temperature = 40
        gpu.unsupported = NO_MIG
        gpu.settled_us = _monotonic_us() if self.state.real_time else 0

    @property
    def gpus(self) -> list[StandInGpu]:
        return [self.state.gpus[index] for index in range(self.state.count)]

    def keep_gpus(self, count: int) -> None:
        """Have the first so many alone."""
        self.state.count = count

    def have_driver(self, version: str, cuda: tuple[int, int]) -> None:
        """Which driver there is, and the newest CUDA that it runs."""
        self.state.driver = version.encode()
        self.state.cuda = cuda[0] * 1000 + cuda[1] * 10

    def advance(self, seconds: float) -> None:
        """Move time, with the loads as they are; counters follow."""
        self.state.now_us += round(seconds * 1e6)
        self.settle()

    def load(self, gpu: StandInGpu, watts: float) -> None:
        """Change what a GPU's work asks for, from now on."""
        self.settle()
        gpu.load_mw = round(watts * 1e3)

    def settle(self) -> None:
        """Bring every energy counter up to now."""
        now_us = _monotonic_us() if self.state.real_time else self.state.now_us
        for gpu in self.gpus:
            gpu.energy_uj += gpu.draw_mw * (now_us - gpu.settled_us) // 1000
            gpu.settled_us = now_us

    def fail_to_open(self, code: int) -> None:
        """Have ``nvmlInit`` answer this error (0: none)."""
        self.state.init_error = code

    def environment(self) -> dict[str, str]:
        """Return the environment for a process that is to see this machine's GPUs."""
        search = os.environ.get("PYTHONPATH")
        paths = [str(FOLDER), *([search] if search else [])]
        return {**os.environ, "PYTHONPATH": ":".join(paths), VARIABLE: str(self.file)}


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
