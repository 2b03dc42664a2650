"""Keeps what engines have encoded in their node's memory, so that each image is encoded once there.

It is vLLM's encoder-cache connector. The scheduler looks for an image by its identifier, which is
the name that a router has given it (`conserve.media`). If the node's `Arena` has it, the scheduler
sends a copy to the worker, for vLLM's own encoder cache; otherwise it is encoded, and written.

An engine without an arena, since its node's actor was restarted, encodes for itself. One that only
encodes skips what the node has, and loads nothing.
"""

import hashlib
import logging
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

from deployments.node.arena import ARENA_PATH, Arena, ArenaError

logger = logging.getLogger("conserve.engine")

_TENSOR = "encoded"
_MOST_WAITING = 16


@dataclass
class ToLoad(ECConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Encoded images by identifier, for the worker to put into its own cache."""

    encoded: dict[str, bytes] = field(default_factory=dict)


class NodeEncoderCache(ECConnectorBase):  # type: ignore[misc]
    """One engine's access to the arena, for its scheduler or its worker."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        transfer = vllm_config.ec_transfer_config
        assert transfer is not None
        self._arena: Arena | None = None
        try:
            self._arena = Arena(str(transfer.get_from_extra_config(ARENA_PATH, "")))
        except ArenaError as error:
            logger.warning("images are encoded for this engine alone: %s", error)
        # What is encoded depends on the model and its precision, too.
        model = vllm_config.model_config
        self._salt = f"{model.model} {model.revision} {model.dtype}".encode()
        # Copies of what was found: vLLM counts on it, and it must not be overwritten meanwhile.
        self._found: OrderedDict[str, bytes] = OrderedDict()
        self._to_load: dict[str, bytes] = {}

    # --- In the scheduler ---------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        if not self.is_consumer:
            return self._arena is not None and self._arena.has(self._key(identifier))
        if self._arena is not None and identifier not in self._found:
            data = self._arena.get(self._key(identifier))
            if data is not None:
                self._found[identifier] = data
        return identifier in self._found

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        identifier = request.mm_features[index].identifier
        data = self._found.get(identifier)
        if data is not None:
            self._to_load[identifier] = data

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        wanted, self._to_load = self._to_load, {}
        for identifier in wanted:
            del self._found[identifier]
        # Those of requests that found no room yet are asked for again.
        while len(self._found) > _MOST_WAITING:
            self._found.popitem(last=False)
        return ToLoad(wanted)

    # --- In the worker ------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ToLoad)
        for identifier, data in metadata.encoded.items():
            tensor = safetensors.torch.load(data)[_TENSOR]
            encoder_cache[identifier] = tensor.to(current_platform.device_type)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        if self._arena is None:
            return
        tensor = encoder_cache[mm_hash].detach().to("cpu").contiguous()
        if not self._arena.put(self._key(mm_hash), safetensors.torch.save({_TENSOR: tensor})):
            logger.warning("an encoded image is too large for media.encoded_gb")

    def _key(self, identifier: str) -> bytes:
        return hashlib.sha256(self._salt + b"\0" + identifier.encode()).digest()
