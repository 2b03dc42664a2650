"""A worker that is slow with images that are nearly all blue, and says where it is with them.

Each layer of the encoder, and each chunk of such an image's prompt in the lane, takes `PART_S`
longer. A file `encodes` or `prefills` in `FOLDER` has the process's id meanwhile.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conserve_inside.lane.images import Encode
from conserve_inside.lane.scheduler_lane import Job
from conserve_inside.lane.worker import LaneForward
from tests.engines.vision.unpacked import UnpackedWorker

BLUE = (0, 0, 255)
PART_S = 0.25
FOLDER = Path(tempfile.gettempdir()) / "conserve-test-stages"
# The processor's pixels go from -1 to 1, and this is of their mean.
_FULL = 0.9

_encode, _compute = LaneForward.encode, LaneForward.compute
_slow: set[str] = set()


def _slow_encode(self: LaneForward, image: Encode, pause: Callable[[], None]) -> Any:
    data = None if image.image.data is None else image.image.data["pixel_values"].data
    if not isinstance(data, torch.Tensor) or not _is_blue(data):
        return _encode(self, image, pause)
    _slow.add(image.image.identifier)
    _say("encodes")

    def slowly() -> None:
        time.sleep(PART_S)
        pause()

    return _encode(self, image, slowly)


def _slow_compute(self: LaneForward, job: Job, start: int, end: int) -> Callable[[], None]:
    if _slow.isdisjoint(image.identifier for image in job.images):
        return _compute(self, job, start, end)
    _say("prefills")
    time.sleep(PART_S)
    return _compute(self, job, start, end)


def _is_blue(pixels: torch.Tensor) -> bool:
    flat = pixels.float().flatten(end_dim=-4).flatten(start_dim=-2)
    return bool(flat[:, 2].mean() > _FULL and flat[:, 0].mean() < -_FULL)


def _say(stage: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / stage).write_text(str(os.getpid()))


LaneForward.encode = _slow_encode  # type: ignore[method-assign]
LaneForward.compute = _slow_compute  # type: ignore[method-assign]


class SlowWorker(UnpackedWorker):
    """vLLM loads this module for it, where the model runs."""
