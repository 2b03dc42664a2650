"""Measures how busy the machine is on which tools run."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostPressure:
    """The load of the machine that tools run on.

    Attributes:
        running_tools: commands that run in environments now.
        cpu_pressure: the share of time, 0 to 1, in which a process waits for a CPU.
    """

    running_tools: int = 0
    cpu_pressure: float = 0.0


def cpu_pressure(stalls: str | None, load: float, cores: int) -> float:
    """Return the share of time in which a process waits for a CPU.

    Args:
        stalls: the text of ``/proc/pressure/cpu``; None if Linux has none here.
        load: how many processes ran or waited on average, used in its place.
    """
    found = re.search(r"^some avg10=([\d.]+)", stalls or "", re.MULTILINE)
    if found is not None:
        return min(1.0, float(found[1]) / 100)
    return max(0.0, 1 - cores / load) if load > 0 else 0.0
