"""Layers that take turns on a GPU, by ``python -m tests.acceptance.gpu.on_offload``: no engine.

It prints a line of JSON: milliseconds of a pass by how many layers stay, memory that is freed, and
whether outputs are those of layers that all stay.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from conserve_inside.tower.offload import OffloadedTower

DEVICE = torch.device("cuda")
# Qwen2.5-VL's tower: 32 layers of 1,280 and 3,420 values, 38 MB each.
_LAYERS, _WIDTH, _INNER = 32, 1280, 3420
# Patches of an image of 1,920 x 1,080 pixels, and of the largest.
_PATCHES = {"a screenshot": 10_584, "the largest image": 65_536}
_KEPT = (1, 2, 3, 5)
_PASSES = 10


class Layer(nn.Module):
    """The matrix products of a layer, which are nearly all of its work."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        shapes = (
            (3 * width, width),
            (width, width),
            (inner, width),
            (inner, width),
            (width, inner),
        )
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * shape[1] ** -0.5,
                         requires_grad=False)
            for shape in shapes
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, output, gate, up, down = self.weights
        query, key, value = (x @ mixed.t()).chunk(3, dim=-1)
        x = x + (torch.sigmoid(query * key) * value) @ output.t()
        x = x + (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        return x / x.abs().amax(-1, keepdim=True)


def _made() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(_WIDTH, _INNER) for _ in range(_LAYERS)]


def _passed(layers: list[Layer], x: torch.Tensor, until: int | None = None) -> torch.Tensor:
    for layer in layers[:until]:
        x = layer(x)
    return x


@torch.inference_mode()
def _pass_ms(layers: list[Layer], x: torch.Tensor) -> float:
    """Return the time of a pass, one after the other, as those of a queue of images."""
    times = []
    _passed(layers, x)
    for _ in range(_PASSES):
        _wait()
        started_s = time.perf_counter()
        _passed(layers, x)
        _wait()
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times)


def _wait() -> None:
    torch.cuda.synchronize()


def _free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.inference_mode()
def _is_right(layers: list[Layer], x: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also behind passes that end early, on two streams, none of which waits for the other."""
    found = [_passed(layers, x)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    _wait()
    for number in range(6):
        with torch.cuda.stream(streams[number % 2]):
            _passed(layers, x, until=5 * number)
            found.append(_passed(layers, x))
    _wait()
    return all(torch.equal(one, expected) for one in found)


def main() -> None:
    """Print what is found."""
    images = {
        name: torch.randn(patches, _WIDTH, device=DEVICE, dtype=torch.bfloat16)
        for name, patches in _PATCHES.items()
    }
    layers = _made()
    expected = {name: _passed(layers, x).clone() for name, x in images.items()}
    whole_ms = {name: _pass_ms(layers, x) for name, x in images.items()}
    rows: list[dict[str, Any]] = []
    for kept in _KEPT:
        # As a worker does it, which has loaded all layers.
        layers = _made()
        before = _free_bytes()
        tower = OffloadedTower(layers, kept, DEVICE)
        freed = _free_bytes() - before
        rows.append(
            {
                "kept": kept,
                "freed_bytes": freed,
                "said_bytes": tower.freed_bytes,
                "right": all(_is_right(layers, x, expected[name]) for name, x in images.items()),
                "pass_ms": {name: _pass_ms(layers, x) for name, x in images.items()},
            }
        )
    found = {"whole_ms": whole_ms, "layer_bytes": tower.layer_bytes, "rows": rows}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
