"""How busy the machine is on which tools run."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostPressure:
    """Tells admission of the machine that tools run on.

    Attributes:
        running_tools: how many commands run in environments now.
        cpu_pressure: the share of time, 0 to 1, in which somebody waits for a CPU.
    """

    running_tools: int = 0
    cpu_pressure: float = 0.0


def cpu_pressure(stalls: str | None, load: float, cores: int) -> float:
    """The share of time in which somebody waits for a CPU.

    Args:
        stalls: the text of ``/proc/pressure/cpu``; None: Linux has none here.
        load: how many processes ran or waited on average, in its place.
        cores: how many can run at a time.

    Example:
        >>> cpu_pressure("some avg10=12.50 avg60=3.00 avg300=0.90 total=1", load=9.0, cores=2)
        0.125
        >>> cpu_pressure(None, load=4.0, cores=2)  # Two of four wait.
        0.5
    """
    found = re.search(r"^some avg10=([\d.]+)", stalls or "", re.MULTILINE)
    if found is not None:
        return min(1.0, float(found[1]) / 100)
    return max(0.0, 1 - cores / load) if load > 0 else 0.0
