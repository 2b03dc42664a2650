"""Keeps a few layers of a model's vision tower on the GPU, and copies the others in as it encodes.

After Nova (section III-E). K buffers on the GPU, the slots, have the weights of K of the tower's
layers; pinned host memory has all. Layer l runs in slot l mod K. Once it has run, its slot gets the
layer that comes next there (`following`), on a stream of its own. Events order copies and kernels.

A layer whose slot was not given its weights raises `LayerMissing`, and its image fails as any does
that cannot be encoded (`failures`). The next pass through the tower begins with its first layers
again. Passes may come from different threads, and on different streams, but one at a time.

It takes the weights as they are once vLLM has loaded, quantised and packed them (`loading`). On a
CPU it copies within host memory, which saves nothing, so that tests run the same code.

Internals of vLLM that are used: the names of a model's towers (``_tower_model_names``,
``get_mm_mapping``); that a tower calls its layers one after the other, by ``forward``;
``pin_tensor``.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("vllm.conserve")

_SETTING = "media.tower_layers"
# Tensors begin at multiples of it, as CUDA's allocator has them.
_ALIGNED_BYTES = 256


class LayerMissing(RuntimeError):
    """A layer would run with weights that are not its own."""


def following(layer: int, slots: int, layers: int) -> int:
    """Return the layer that comes next into a layer's slot (equation 7).

    Behind the last layers come the first ones, for the next pass.
    """
    later = layer + slots
    return later if later < layers else layer % slots


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor within the bytes of its layer."""

    name: str
    offset: int
    bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        own = memory[self.offset : self.offset + self.bytes]
        return own.view(self.dtype).as_strided(self.size, self.stride)


class _Copies:
    """Copies layers into slots, on a CPU: whatever was begun is over."""

    def begin(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy, which waits for the kernels that read the slot."""
        target.copy_(source)

    def require(self, slot: int) -> None:
        """Have what the caller launches next wait for the slot's copy."""

    def read(self, slot: int) -> None:
        """Note that the caller has launched kernels that read the slot."""


class _CudaCopies(_Copies):
    """Copies on a stream of its own, beside kernels on whatever stream is the caller's."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(slots)]
        self._read = [torch.cuda.Event() for _ in range(slots)]

    def begin(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.wait_event(self._read[slot])
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._copied[slot].record(self._stream)

    def require(self, slot: int) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[slot])
        # Of a pass on another stream, since only the last read is noted.
        stream.wait_event(self._read[slot])

    def read(self, slot: int) -> None:
        self._read[slot].record(torch.cuda.current_stream(self._device))


class OffloadedTower:
    """The layers of a tower, in the order in which they run, of which ``kept`` stay on the GPU.

    A layer's tensors are in host memory until it first runs, and in its slot from then on. So a
    tower that would compute with them otherwise, past ``forward``, fails for having them on the
    wrong device. Raises `RuntimeError` if the layers cannot take each other's place.
    """

    def __init__(self, layers: Sequence[nn.Module], kept: int, device: torch.device) -> None:
        self._count, self._kept = len(layers), kept
        self._tensors = _own_tensors(layers)
        self._places = _places(self._tensors)
        last = self._places[-1]
        self.layer_bytes = _aligned(last.offset + last.bytes)
        self._host = torch.empty(self._count, self.layer_bytes, dtype=torch.uint8)
        for memory, tensors in zip(self._host, self._tensors, strict=True):
            for place in self._places:
                home = place.within(memory)
                home.copy_(tensors[place.name])
                tensors[place.name].data = home
            if device.type == "cuda":
                # vLLM has pinned what it processed, and PyTorch would keep that.
                torch.accelerator.empty_host_cache()
        if device.type == "cuda":
            # PyTorch's own allocator of pinned memory would round up to a power of two. It is not
            # loaded with this module, since it looks at the GPU.
            from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

            pin_tensor(self._host)
        self._slots = torch.empty(kept, self.layer_bytes, dtype=torch.uint8, device=device)
        # The layer whose weights each slot has, or gets by a copy that was begun; None: neither.
        self._holds: list[int | None] = [None] * kept
        self._moved: set[int] = set()
        self._copies = _CudaCopies(kept, device) if device.type == "cuda" else _Copies()
        for slot in range(kept):
            # Whatever had this memory before.
            self._copies.read(slot)
        self._begin_again()
        for number, layer in enumerate(layers):
            layer.forward = self._swapping(number, layer.forward)

    @property
    def freed_bytes(self) -> int:
        return (self._count - self._kept) * self.layer_bytes

    @property
    def host_bytes(self) -> int:
        return self._count * self.layer_bytes

    def _swapping(self, number: int, forward: Any) -> Any:
        slot = number % self._kept

        @functools.wraps(forward)
        def swapped(*args: Any, **kwargs: Any) -> Any:
            self._require(number)
            try:
                output = forward(*args, **kwargs)
            finally:
                self._copies.read(slot)
            self._load(following(number, self._kept, self._count))
            return output

        return swapped

    def _require(self, number: int) -> None:
        if number == 0:
            self._begin_again()
        slot = number % self._kept
        held = self._holds[slot]
        if held != number:
            raise LayerMissing(
                f"layer {number} of the vision tower does not run, since its slot has "
                f"{'no layer' if held is None else f'layer {held}'}; this image is not encoded"
            )
        self._copies.require(slot)
        if number not in self._moved:
            for place in self._places:
                self._tensors[number][place.name].data = place.within(self._slots[slot])
            self._moved.add(number)

    def _begin_again(self) -> None:
        """Load the first layers, unless the last pass has, as it does if it was not broken off."""
        for number in range(self._kept):
            self._load(number)

    def _load(self, number: int) -> None:
        slot = number % self._kept
        if self._holds[slot] == number:
            return
        # If the copy cannot begin, the slot has neither.
        self._holds[slot] = None
        self._copies.begin(slot, self._slots[slot], self._host[number])
        self._holds[slot] = number


def _own_tensors(layers: Sequence[nn.Module]) -> list[dict[str, torch.Tensor]]:
    """Return each layer's parameters and buffers that no other layer has, by name."""
    found = [
        {name: one for name, one in (*layer.named_parameters(), *layer.named_buffers())
         if one.numel()}
        for layer in layers
    ]  # fmt: skip
    users = Counter(one.data_ptr() for tensors in found for one in tensors.values())
    own = [
        {name: one for name, one in tensors.items() if users[one.data_ptr()] == 1}
        for tensors in found
    ]
    if not all(own):
        raise RuntimeError(f"{_SETTING}: the tower's layers have no weights of their own; unset it")
    return own


def _places(layers: Sequence[dict[str, torch.Tensor]]) -> list[_Place]:
    """Return where a layer's tensors lie, which is the same for all layers."""
    laid_out = [_laid_out(tensors) for tensors in layers]
    for number, places in enumerate(laid_out):
        if places != laid_out[0]:
            raise RuntimeError(
                f"{_SETTING}: layer {number} of the vision tower has other weights than layer 0, "
                "so they cannot take each other's place; unset it"
            )
    return laid_out[0]


def _laid_out(tensors: dict[str, torch.Tensor]) -> list[_Place]:
    places, offset = [], 0
    for name, one in tensors.items():
        values = 1 + sum((n - 1) * step for n, step in zip(one.size(), one.stride(), strict=True))
        place = _Place(name, offset, values * one.element_size(), one.dtype,
                       tuple(one.size()), tuple(one.stride()))  # fmt: skip
        places.append(place)
        offset += _aligned(place.bytes)
    return places


def _aligned(count: int) -> int:
    return math.ceil(count / _ALIGNED_BYTES) * _ALIGNED_BYTES


def layers_of_tower(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the longest list of layers in a model's towers, and its name; else `RuntimeError`."""
    names = list(getattr(model, "_tower_model_names", ()))
    if hasattr(model, "get_mm_mapping"):
        names += model.get_mm_mapping().tower_model
    modules = dict(model.named_modules())
    within = tuple(f"{name.rstrip('.')}." for name in names)
    lists = [
        (name, one)
        for name, one in modules.items()
        if name.startswith(within) and isinstance(one, nn.ModuleList) and len(one)
    ]
    if not lists:
        raise RuntimeError(f"{_SETTING}: this engine has loaded no tower with layers; unset it")
    return max(lists, key=lambda found: len(found[1]))


def offload(model: Any, kept: int, device: torch.device) -> OffloadedTower | None:
    """Keep this many layers of a model's tower on the device; None if it has no more."""
    name, layers = layers_of_tower(model)
    if kept >= len(layers):
        logger.info("%s: %d: all %d layers of %s stay, and nothing is offloaded", _SETTING, kept,
                    len(layers), name)  # fmt: skip
        return None
    tower = OffloadedTower(layers, kept, device)
    if device.type == "cuda":
        # vLLM measures next what is left for KV.
        torch.cuda.empty_cache()
    where = "GPU, which frees" if device.type == "cuda" else "CPU; on a GPU this would free"
    logger.info(
        "%d of %d layers of %s stay on the %s %.2f GiB for KV; %.2f GiB of host memory have all",
        kept, len(layers), name, where, tower.freed_bytes / 2**30, tower.host_bytes / 2**30,
    )  # fmt: skip
    return tower


def require_plain_layers(compilation: Any) -> None:
    for argument in ("compile_mm_encoder", "cudagraph_mm_encoder"):
        if getattr(compilation, argument):
            raise RuntimeError(
                f"{_SETTING}: engine.compilation_config.{argument} would run the tower's layers "
                "without it; unset one of them"
            )
