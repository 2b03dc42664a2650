"""Encoded images in a node's memory, as one of its engines writes and finds them."""

import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

from deployments.node.arena import ARENA_PATH, Arena, ArenaError

logger = logging.getLogger("conserve.engine")

# Images, as `NodeImages.missing_tokens` takes them.
Images = Iterable[tuple[str, Any]]
MissingTokens = Callable[[Images], int]


class NodeImages:
    """One thread's access to the node's `Arena`, by vLLM's identifiers of images.

    Without an arena, since ``media.encoded_gb`` is 0 or its node's actor was restarted, it has
    nothing and keeps nothing.
    """

    def __init__(self, vllm_config: Any, *, waits: bool = True) -> None:
        self._arena: Arena | None = None
        transfer = vllm_config.ec_transfer_config
        path = "" if transfer is None else str(transfer.get_from_extra_config(ARENA_PATH, ""))
        if path:
            try:
                self._arena = Arena(path, waits=waits)
            except ArenaError as error:
                logger.warning("images are encoded for this engine alone: %s", error)
        # What is encoded depends on the model and its precision, too.
        model = vllm_config.model_config
        self._salt = f"{model.model} {model.revision} {model.dtype}".encode()

    @property
    def keeps(self) -> bool:
        return self._arena is not None

    def has(self, identifier: str) -> bool:
        return self._arena is not None and self._arena.has(self._key(identifier))

    def get(self, identifier: str) -> bytes | None:
        return None if self._arena is None else self._arena.get(self._key(identifier))

    def put(self, identifier: str, data: bytes) -> None:
        if self._arena is not None and not self._arena.put(self._key(identifier), data):
            logger.warning("an encoded image is too large for media.encoded_gb")

    def missing_tokens(self, images: Images) -> int:
        """Return the embeddings of images that are not here; equal images count once.

        Each image is an identifier and a ``PlaceholderRange``.
        """
        return sum(
            position.get_num_embeds()
            for identifier, position in dict(images).items()
            if not self.has(identifier)
        )

    def _key(self, identifier: str) -> bytes:
        return hashlib.sha256(self._salt + b"\0" + identifier.encode()).digest()


def images_of(prompt: Any) -> list[tuple[str, Any]]:
    """Return the identifiers and ``PlaceholderRange``s of the images in a rendered prompt."""
    if not isinstance(prompt, dict) or not prompt.get("mm_hashes"):
        return []
    hashes, places = prompt["mm_hashes"], prompt["mm_placeholders"]
    return [
        pair for kind, names in hashes.items() for pair in zip(names, places[kind], strict=True)
    ]
