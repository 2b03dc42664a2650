"""Keeps what engines have encoded in their node's memory, so that each image is encoded once there.

It is vLLM's encoder-cache connector. The scheduler looks for an image by its identifier, which is
the name that a router has given it (`conserve.media`). If the node has it (`NodeImages`), the
scheduler sends a copy to the worker, for vLLM's own encoder cache; otherwise it is encoded, and
written. With a request's last output the scheduler tells what its images took (`wire.Encoded`).

An engine that only encodes skips what the node has, and loads nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.platforms import current_platform

from conserve.wire import ENCODED, NOTHING_ENCODED, Encoded
from deployments.engine.vision.images import NodeImages, can_tell_failures, failures
from deployments.upstream import encoder_errors
from deployments.upstream.patch import require

_TENSOR = "encoded"
_MOST_WAITING = 16


@dataclass
class ToLoad(ECConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Encoded images by identifier, for the worker to put into its own cache."""

    encoded: dict[str, bytes] = field(default_factory=dict)


class NodeEncoderCache(ECConnectorBase):  # type: ignore[misc]
    """Connects an engine's scheduler, or its worker, to the images that its node has."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._images = NodeImages(vllm_config)
        # Copies of what was found: vLLM counts on it, and it must not be overwritten meanwhile.
        self._found: OrderedDict[str, bytes] = OrderedDict()
        self._to_load: dict[str, bytes] = {}
        self._took: dict[str, Encoded] = {}
        if role == ECConnectorRole.WORKER:
            # vLLM makes its connector before it loads the model.
            prepare_worker(vllm_config)

    # --- In the scheduler ---------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        if not self.is_consumer:
            return self._images.has(identifier)
        if identifier not in self._found:
            data = self._images.get(identifier)
            if data is not None:
                self._found[identifier] = data
        return identifier in self._found

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        image = request.mm_features[index]
        data = self._found.get(image.identifier)
        if data is not None:
            self._to_load[image.identifier] = data
            took = Encoded(node_images=1)
        elif not self.is_consumer and self._images.has(image.identifier):
            return
        else:
            took = Encoded(1, image.mm_position.get_num_embeds())
        self.took(request.request_id, took)

    def take(self, identifier: str) -> bytes | None:
        """Return an image's embeddings, if the node has them, for a worker to load."""
        found = self._found.get(identifier)
        return self._images.get(identifier) if found is None else found

    def took(self, request_id: str, took: Encoded) -> None:
        self._took[request_id] = self._took.get(request_id, NOTHING_ENCODED).plus(took)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        wanted, self._to_load = self._to_load, {}
        for identifier in wanted:
            del self._found[identifier]
        # Those of requests that found no room yet are asked for again.
        while len(self._found) > _MOST_WAITING:
            self._found.popitem(last=False)
        return ToLoad(wanted)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        took = self._took.pop(request.request_id, None)
        return False, None if took is None else {ENCODED: list(took)}

    # --- In the worker ------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ToLoad)
        for identifier, data in metadata.encoded.items():
            encoder_cache[identifier] = read_encoded(data)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        if self._images.keeps and not failures.include([mm_hash]):
            tensor = encoder_cache[mm_hash].detach().to("cpu").contiguous()
            self._images.put(mm_hash, safetensors.torch.save({_TENSOR: tensor}))


def prepare_worker(vllm_config: VllmConfig) -> None:
    """Patch this process's worker, before it loads its model."""
    if can_tell_failures(vllm_config):
        require(encoder_errors.PATCH)
        encoder_errors.survive_encoders(failures.add)


def read_encoded(data: bytes) -> torch.Tensor:
    """Read what `NodeEncoderCache.save_caches` has written, onto this worker's device."""
    tensor: torch.Tensor = safetensors.torch.load(data)[_TENSOR]
    return tensor.to(current_platform.device_type)
