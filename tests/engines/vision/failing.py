"""A worker whose encoder fails on an image that is all green, as one does that runs out of memory.

At its start vLLM has an encoder encode an image that is all red.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration

from tests.engines.vision.unpacked import UnpackedWorker

GREEN = (0, 255, 0)
# The processor's pixels go from -1 to 1.
_FULL = 0.99

_embed = Idefics3ForConditionalGeneration.embed_multimodal


@functools.wraps(_embed)
def _embed_unless_green(model: Any, **inputs: Any) -> Any:
    pixels = inputs["pixel_values"]
    for tiles in [pixels] if isinstance(pixels, torch.Tensor) else pixels:
        flat = tiles.float().flatten(end_dim=-4).flatten(start_dim=-2)
        if ((flat[:, 1] > _FULL).all(-1) & (flat[:, 0] < -_FULL).all(-1)).any():
            raise RuntimeError("the encoder has no memory")
    return _embed(model, **inputs)


Idefics3ForConditionalGeneration.embed_multimodal = _embed_unless_green


class FailingWorker(UnpackedWorker):
    """vLLM loads this module for it, where the model runs."""
