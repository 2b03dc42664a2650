"""Runs kernels on the SMs of a lease, by CUDA's green contexts (cuda-bindings).

The driver splits the GPU as `hetero.sm_units` says, so contexts of different units share no SM
across processes. Contexts share the primary context's memory. They are made once and live as long
as their process, since making one takes milliseconds and memory.

Needs driver 570. ``python -m conserve_inside.sm_slots.green_contexts`` tests for it in a process of
its own, since an MPS percentage, the alternative, has to be set before a process looks at its GPU.
"""

import importlib
import subprocess
import sys
from typing import Any

from hetero.sm_units import SmSlots

# CUDA 12.8, which drivers from 570 support.
_LEAST_CUDA = 12_080
_PROBE_TIMEOUT_S = 60.0


class SmsUnavailable(Exception):
    """SMs of this GPU cannot be leased here; the message says why."""


class GreenContexts:
    """One device's green contexts; ``ordinal`` is its index for CUDA in this process.

    Raises `SmsUnavailable` if the driver splits the device differently from the ledger.
    """

    name = "green contexts"

    def __init__(self, slots: SmSlots, ordinal: int, driver: Any = None) -> None:
        self._driver = load_driver() if driver is None else driver
        self._split = slots.split
        self._device = self._call("cuDeviceGet", ordinal)
        self._units, self._rest = self._split_device()
        # Contexts and streams by units. They must never be collected, since kernels use them.
        self._made: dict[range, tuple[Any, Any]] = {}

    def stream(self, units: range) -> int:
        """Return the handle of the stream whose kernels run on these units; always the same one.

        Raises `SmsUnavailable` if the driver makes no such context.
        """
        if not units or not 0 <= units.start < units.stop <= self._split.units:
            raise ValueError(f"units {units.start} to {units.stop - 1} are not this GPU's")
        if units not in self._made:
            self._made[units] = self._make(units)
        return int(self._made[units][1])

    def sms(self, units: range) -> int:
        """Return the SMs of a context; fewer than leased if the driver does not join the rest."""
        return sum(int(resource.sm.smCount) for resource in self._resources(units))

    def _split_device(self) -> tuple[list[Any], Any]:
        driver, split = self._driver, self._split
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._call("cuDeviceGetDevResource", self._device, kind)
        there = int(whole.sm.smCount)
        if there != split.sm_count:
            raise SmsUnavailable(
                f"the driver has {there} SMs to split where the ledger has {split.sm_count}; under "
                "MPS, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE has to be unset or 100"
            )
        if split.units == 1:
            return [whole], None
        found = self._call("cuDevSmResourceSplitByCount", split.units, whole, 0, split.unit_sms)
        units, count, rest = found
        units = list(units)[: int(count)]
        sizes = [int(unit.sm.smCount) for unit in units]
        # An empty rest has no type.
        rest_sms = int(rest.sm.smCount) if rest.type == kind else 0
        if sizes != [split.unit_sms] * split.units or rest_sms != split.rest_sms:
            counted = ", ".join(f"{sizes.count(one)} of {one}" for one in sorted(set(sizes)))
            raise SmsUnavailable(
                f"the driver splits {there} SMs into {counted or 'nothing'} and a rest of "
                f"{rest_sms}, and the ledger into {split.units} of {split.unit_sms} and a rest of "
                f"{split.rest_sms}: no lease would mean the same SMs to both"
            )
        return units, rest if rest_sms else None

    def _resources(self, units: range) -> list[Any]:
        found = [self._units[unit] for unit in units]
        # The driver joins only resources with the same alignment.
        rest = self._rest
        if rest is not None and units and units.stop == self._split.units:
            alike = rest.sm.smCoscheduledAlignment == found[-1].sm.smCoscheduledAlignment
            found += [rest] if alike else []
        return found

    def _make(self, units: range) -> tuple[Any, Any]:
        resources = self._resources(units)
        flags = self._driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        non_blocking = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        description = self._call("cuDevResourceGenerateDesc", resources, len(resources))
        context = self._call("cuGreenCtxCreate", description, self._device, int(flags))
        stream = self._call("cuGreenCtxStreamCreate", context, int(non_blocking), 0)
        return context, stream

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._driver, name, *arguments)


def load_driver() -> Any:
    """Return ``cuda.bindings.driver``; raises `SmsUnavailable` if it is missing or too old."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        version = int(_call(driver, "cuDriverGetVersion"))
    except SmsUnavailable:
        raise
    # The exception raised without a libcuda has a name only in newer versions of cuda-bindings.
    except Exception as error:
        raise SmsUnavailable(f"no CUDA driver by cuda-bindings: {error}") from None
    if version < _LEAST_CUDA:
        raise SmsUnavailable(
            f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}, and green contexts "
            "want 12.8 (driver 570) or newer"
        )
    return driver


def why_not() -> str:
    """Return why another process finds no green contexts here; empty if it finds them."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"CUDA's driver did not answer within {_PROBE_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    return done.stdout.strip() or f"looking for them ended with {done.returncode}"


def probe(driver: Any = None) -> None:
    """Split each visible device, without a context; raises `SmsUnavailable` if that fails.

    An engine's process may see all GPUs of its node, of which some may be of another kind.
    """
    driver = load_driver() if driver is None else driver
    _call(driver, "cuInit", 0)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    for ordinal in range(_call(driver, "cuDeviceGetCount")):
        device = _call(driver, "cuDeviceGet", ordinal)
        whole = _call(driver, "cuDeviceGetDevResource", device, kind)
        _call(driver, "cuDevSmResourceSplitByCount", 1, whole, 0, int(whole.sm.minSmPartitionSize))


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call the driver, which returns an error code before its results."""
    function = getattr(driver, name, None)
    if function is None:
        raise SmsUnavailable(f"this cuda-bindings has no {name}")
    error, *found = function(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SmsUnavailable(f"{name}: {error.name}")
    return found[0] if len(found) == 1 else tuple(found)


def main() -> int:
    try:
        probe()
    except SmsUnavailable as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
