"""By what an engine keeps to the SMs that it has leased: green contexts, MPS, or nothing.

| means | whose SMs | the border can move |
| --- | --- | --- |
| green contexts | exactly those of the lease | yes |
| an MPS percentage | as many, whichever | no: it holds from when a process first looks at its GPU |
| none | there are no SMs: an engine on CPUs | no |

Engines in different processes run beside each other only where an MPS control daemon runs; without
one the driver has them take turns on the GPU, each on its own SMs. Within a process, streams of
different contexts always run beside each other.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Protocol

from hetero import green_contexts
from hetero.green_contexts import GreenContexts, SmsUnavailable
from hetero.sm_units import SM_SLOTS, SmSlots

_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"  # NVIDIA's own.


class SmMeans(Protocol):
    """Tells by what means an engine's worker keeps to its SMs."""

    @property
    def name(self) -> str:
        """For people."""

    def stream(self, units: range) -> int | None:
        """The handle of a CUDA stream that keeps to these units; None: streams are as they are."""


class MpsPercentage:
    """The whole process is held to a share of the SMs, and no stream of it to fewer."""

    name = "an MPS percentage"

    def stream(self, units: range) -> None:
        """None: it is the process that is held."""


class NoSms:
    """An engine on CPUs, which have no SMs to lease: its threads run where the system puts them."""

    name = "nothing: there are no SMs"

    def stream(self, units: range) -> None:
        """None."""


def prepare(slots: int, environment: MutableMapping[str, str] = os.environ) -> str:
    """Choose the means of this process, which has not looked at its GPU yet.

    MPS takes its share from the environment, and green contexts want to find all SMs there.

    Args:
        environment: of this process; the share is set there, or taken away.

    Returns:
        Why there are no green contexts; nothing where there are.

    Raises:
        SmsUnavailable: neither is to be had; says why, and what to do.
    """
    why_not = green_contexts.why_not()
    if not why_not:
        environment.pop(_PERCENTAGE, None)
        return ""
    if not mps_runs(environment):
        raise SmsUnavailable(
            f"no green contexts ({why_not}), and no MPS control daemon in "
            f"{_pipe_directory(environment)}: install driver 570 or newer, start "
            "`nvidia-cuda-mps-control -d`, or leave sm_slots out"
        )
    environment[_PERCENTAGE] = str(100 * slots // SM_SLOTS)
    return why_not


def means_of(slots: SmSlots, ordinal: int, why_no_contexts: str) -> SmMeans:
    """The means that `prepare` has chosen, now that the process has its device.

    Args:
        slots: of the device.
        ordinal: which device that is to CUDA.
        why_no_contexts: what `prepare` returned.

    Raises:
        SmsUnavailable: the driver splits the device otherwise than the ledger.
    """
    return MpsPercentage() if why_no_contexts else GreenContexts(slots, ordinal)


def mps_runs(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether an MPS control daemon is where CUDA would look for one."""
    return (_pipe_directory(environment) / "control").exists()


def _pipe_directory(environment: MutableMapping[str, str]) -> Path:
    return Path(environment.get(_DIRECTORY, _DEFAULT_DIRECTORY))
