"""Checks a node's GPUs, by what NVML says."""

import glob
from collections.abc import Iterator
from dataclasses import dataclass

from conserve.settings import Settings
from conserve_cli.doctor.findings import Finding, gibibytes, note, ok, warning, wrong
from conserve_cli.doctor.listeners import command_of, owner_of, process_name
from conserve_cli.doctor.machine import has_capability
from hetero.gpu_layout import UTILISATION
from hetero.nvml import Gpu, GpuProcess, MigDevice, NoDriver, Nvml, NvmlError

_CAP_SYS_ADMIN = 21
# With less, there is no room for an engine of any share.
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver, for checks of more than its GPUs."""

    has_devices: bool  # Whether the kernel shows NVIDIA devices.
    version: str = ""
    cuda: tuple[int, int] = (0, 0)  # The newest that it runs; (0, 0): not known.
    gpus: int = 0  # GPUs and MIG devices for engines.


def find_driver() -> Driver:
    try:
        with Nvml() as nvml:
            gpus = sum(len(gpu.mig_devices) if gpu.mig_enabled else 1 for gpu in nvml.inventory())
            return Driver(True, nvml.driver_version(), nvml.cuda_version(), gpus)
    except NoDriver:
        return Driver(bool(glob.glob("/dev/nvidia[0-9]*")))
    except NvmlError:
        return Driver(True)


def check_gpus(
    driver: Driver, settings: Settings, caps_power: bool, has_engines: bool = True
) -> Iterator[Finding]:
    """Check this node's GPUs.

    Args:
        caps_power: whether power caps are asked for here.
        has_engines: whether engines can be here at all.
    """
    if not driver.has_devices:
        if not has_engines:
            yield ok("GPU", "none; no engine runs here")
        elif settings.device == "gpu":
            yield wrong(
                "GPU",
                "no NVIDIA device here, and device=gpu",
                "give the container its GPUs, mend the driver, or set device=auto",
            )
        else:
            yield ok("GPU", "none; engines run on the CPU")
        return
    try:
        with Nvml() as nvml:
            # All of it, since an error in the middle makes the rest worthless.
            findings = list(_cards(nvml, driver, has_engines and settings.device != "cpu"))
    except NvmlError as error:
        yield wrong("GPU", "NVML cannot be used", str(error))
        return
    yield from findings
    if caps_power and not has_capability(_CAP_SYS_ADMIN):
        yield warning(
            "power",
            "this user may not change power limits: GPUs run uncapped",
            "run the node's Ray as root or with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN)",
        )


def _cards(nvml: Nvml, driver: Driver, has_engines: bool) -> Iterator[Finding]:
    gpus = nvml.inventory()
    names = [gpu.name for gpu in gpus]
    named = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    runs = f"driver {driver.version}, CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    yield ok("GPU", f"{named or 'none answers'}; {runs}")
    for index in nvml.lost():
        seen = f"GPU {index} does not answer: it fell off the bus"
        yield wrong("GPU", seen, "see dmesg for its Xid; reset it or restart the machine")
    for gpu in gpus if has_engines else ():
        label = f"GPU {gpu.index}"
        if not gpu.mig_enabled:
            yield from _memory(nvml, label, gpu)
            continue
        yield _mig(label, gpu)
        for number, part in enumerate(gpu.mig_devices):
            yield from _memory(nvml, f"MIG device {number} of {label}", part)


def _mig(label: str, gpu: Gpu) -> Finding:
    leave = f"leave the mode (nvidia-smi -i {gpu.index} -mig 0)"
    parts = [gibibytes(part.memory_bytes) for part in gpu.mig_devices]
    if not parts:
        return wrong(
            "MIG",
            f"{label} is in MIG mode and has no MIG device: no engine can use it",
            f"make one (nvidia-smi mig -i {gpu.index} -cgi ... -C), or {leave}",
        )
    if len(parts) == 1:
        return ok("MIG", f"{label} is in MIG mode, with one device of {parts[0]}")
    return warning(
        "MIG",
        f"{label} is in MIG mode, with {len(parts)} devices ({', '.join(parts)}): CUDA shows a "
        "process one of them, so LMCache's server reaches no engine on another",
        f"have all engines on one, by CUDA_VISIBLE_DEVICES=MIG-... before Ray starts; or {leave}",
    )


def _memory(nvml: Nvml, label: str, one: Gpu | MigDevice) -> Iterator[Finding]:
    free_bytes = nvml.memory_free_bytes(one.uuid)
    # vLLM does not start an engine whose share is not free.
    if free_bytes >= UTILISATION * one.memory_bytes:
        return
    free = f"{gibibytes(free_bytes)} of {gibibytes(one.memory_bytes)}"
    try:
        holders = [(holder, command_of(holder.pid)) for holder in nvml.processes(one.uuid)]
    except NvmlError:
        holders = []  # Some drivers show no processes.
    held = ", ".join(_held(*holder) for holder in holders)
    seen = f"{label} has {free} free; {held or 'who has the rest cannot be seen from here'}"
    if holders and all(owner_of(command) for _, command in holders):
        to_do = "nothing, if that is the application; else end it before another starts"
        yield note("GPU memory", seen, to_do)
        return
    full = free_bytes < _LEAST_SHARE * one.memory_bytes
    share = f"an engine of vLLM's usual share of {UTILISATION:.0%} does not start there"
    yield Finding(
        "wrong" if full else "warning",
        "GPU memory",
        f"{seen}; " + ("no engine starts there" if full else share),
        "end the processes that have it"
        + ("" if held else " (nvidia-smi lists it)")
        + ", or keep engines off that GPU by CUDA_VISIBLE_DEVICES"
        + ("" if full else ", or set a smaller engine.gpu_memory_utilization"),
    )


def _held(holder: GpuProcess, command: str) -> str:
    has = "some" if holder.memory_bytes is None else gibibytes(holder.memory_bytes)
    name = process_name(command) if command else "a process not visible from here"
    return f"{name} (pid {holder.pid}) has {has}"
