"""Has NIXL's progress thread sleep while nothing arrives.

NIXL's Python API sets the time that it may sleep to zero, so it takes a whole core of an idle
machine (NIXL 1.5.1: 98 % measured; 0 % with the time below).
"""

from deployments.upstream.patch import Patch

_LONGEST_SLEEP_US = 10_000


def sleep_when_idle() -> None:
    """Have later agents of this process sleep; NIXL is installed where nodes share KV."""
    # As nixl_cu12._api has it, too.
    from nixl_cu12 import _bindings  # type: ignore[attr-defined]  # Compiled, without types.

    config: type = _bindings.nixlAgentConfig

    class SleepingConfig(config):  # type: ignore[misc]  # Compiled, without types.
        """Takes the delay of zero for the one above."""

        @property
        def pthrDelay(self) -> int:
            return int(config.pthrDelay.__get__(self))  # type: ignore[attr-defined]

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            delay = microseconds or _LONGEST_SLEEP_US
            config.pthrDelay.__set__(self, delay)  # type: ignore[attr-defined]

    _bindings.nixlAgentConfig = SleepingConfig


PATCH = Patch(
    name="spinning_progress",
    seams=("nixl_cu12._api:nixl_agent.__init__", "nixl_cu12._bindings:nixlAgentConfig.pthrDelay"),
    why="with several nodes, an idle LMCache server takes a whole core",
    upstream="not reported: nixl_agent.__init__ (ai-dynamo/nixl) hard-codes pthrDelay = 0",
    process="lmcache",
)
