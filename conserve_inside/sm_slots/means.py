"""Chooses how an engine keeps to its leased SMs: green contexts or an MPS percentage.

A green context has exactly the lease's SMs, and its border can move. An MPS percentage gives as
many SMs, whichever, fixed when the process first looks at its GPU.

Engines in different processes run at the same time only if an MPS control daemon runs; otherwise
the driver has them take turns. Streams of different contexts in one process always run together.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Protocol

from conserve_inside.sm_slots import green_contexts
from conserve_inside.sm_slots.green_contexts import GreenContexts, SmsUnavailable
from hetero.sm_units import SM_SLOTS, SmSlots

_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"  # NVIDIA's own.


class SmMeans(Protocol):
    @property
    def name(self) -> str: ...

    def stream(self, units: range) -> int | None:
        """Return the handle of a CUDA stream on these units; None: any stream will do."""


class MpsPercentage:
    """Holds the whole process, and no single stream, to a share of the SMs."""

    name = "an MPS percentage"

    def stream(self, units: range) -> None: ...


class NoSms:
    """An engine on CPUs, which has no SMs to lease."""

    name = "nothing: there are no SMs"

    def stream(self, units: range) -> None: ...


def prepare(slots: int, environment: MutableMapping[str, str] = os.environ) -> str:
    """Choose the means of this process before it looks at its GPU; return why no green contexts.

    MPS reads its share from the environment; green contexts need all SMs there. Raises
    `SmsUnavailable` if neither is available.
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
    """Return the means that `prepare` chose with ``why_no_contexts``; raises `SmsUnavailable`."""
    return MpsPercentage() if why_no_contexts else GreenContexts(slots, ordinal)


def mps_runs(environment: MutableMapping[str, str] = os.environ) -> bool:
    return (_pipe_directory(environment) / "control").exists()


def _pipe_directory(environment: MutableMapping[str, str]) -> Path:
    return Path(environment.get(_DIRECTORY, _DEFAULT_DIRECTORY))
