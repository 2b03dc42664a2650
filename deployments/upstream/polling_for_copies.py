"""Has an LMCache server without a GPU rarely look for copies to or from one.

LMCache 0.5.6 looks 200 times a second whether a copy has ended, which took as much as an idle
engine.
"""

from typing import Any

from deployments.upstream.patch import Patch

_LOOKS_EVERY_S = 1.0


def apply() -> None:
    import torch
    from lmcache.v1.multiprocess.native_completion import DeviceHostFuncDispatcher

    if not torch.accelerator.is_available():
        start: Any = DeviceHostFuncDispatcher.__init__
        start.__defaults__ = (_LOOKS_EVERY_S,)


PATCH = Patch(
    name="polling_for_copies",
    seams=("lmcache.v1.multiprocess.native_completion:DeviceHostFuncDispatcher.__init__",),
    why="an idle LMCache server without a GPU wakes up 200 times a second",
    upstream="not reported: DeviceHostFuncDispatcher polls every 5 ms without an accelerator",
    process="lmcache",
)
