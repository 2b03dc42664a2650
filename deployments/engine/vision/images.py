"""Encoded images in a node's memory, as one of its engines writes and finds them, and failures.

The turns whose images an encoder fails on are ended, and not their engine. The worker puts zeros in
the place of such images (`upstream.encoder_errors`), and stores no KV of requests that have one.
The iteration's statistics name them to the engine's server (`FailedImages`), which ends their
turns. From then on it has the same image known by another name, since caches have KV of zeros under
the first one.
"""

import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMUnprocessableEntityError

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


_MOST_REMEMBERED = 4_096
# In the connector's configuration: whether the engine's server gets statistics. An engine that only
# encodes needs none: the engine that needs the image encodes it again, and tells.
TELLS = "conserve.statistics"

# --- In the worker --------------------------------------------------------------------------------


class WorkersFailures:
    """Identifiers of images that this worker could not encode: KV of their zeros is not stored."""

    def __init__(self) -> None:
        self._identifiers: OrderedDict[str, None] = OrderedDict()
        self._untold: list[str] = []

    def add(self, identifier: str) -> None:
        self._identifiers[identifier] = None
        self._untold.append(identifier)
        if len(self._identifiers) > _MOST_REMEMBERED:
            self._identifiers.popitem(last=False)
        # An engine that only encodes tells of none.
        del self._untold[:-_MOST_REMEMBERED]

    def include(self, identifiers: Iterable[str]) -> bool:
        return not self._identifiers.keys().isdisjoint(identifiers)

    def take_untold(self) -> list[str]:
        untold, self._untold = self._untold, []
        return untold


failures = WorkersFailures()


def can_tell_failures(vllm_config: Any) -> bool:
    """Whether turns would be ended; otherwise an encoder that fails has to end its engine."""
    transfer = vllm_config.ec_transfer_config
    alone = vllm_config.parallel_config.world_size == 1
    return alone and bool(transfer.get_from_extra_config(TELLS, False))


# --- In the engine's server -----------------------------------------------------------------------


class ImageNotEncoded(VLLMUnprocessableEntityError):  # type: ignore[misc]  # To mypy it is Any.
    """A turn cannot be answered, since an image of its prompt could not be encoded (422)."""

    def __init__(self) -> None:
        super().__init__(
            "an image of this request could not be encoded, and the engine's log says why; send "
            "another image, or a smaller one"
        )


@dataclass(slots=True, eq=False)
class Watched:
    """A request that runs, with the identifiers of its images."""

    request_id: str
    identifiers: Collection[str]
    failed: bool = False

    def require_encoded(self) -> None:
        """Raise `ImageNotEncoded` if the request was ended because an image has failed."""
        if self.failed:
            raise ImageNotEncoded


class FailedImages:
    """Images that an engine's workers could not encode, and the requests that have them.

    ``end`` ends requests in the engine, by their ids. Clients choose these, so several requests may
    have the same one, and end together.
    """

    def __init__(self, end: Callable[[Sequence[str]], None]) -> None:
        self._end = end
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._times: OrderedDict[str, int] = OrderedDict()
        self._running: set[Watched] = set()

    def name(self, name: str) -> str:
        """Return the name under which the engine knows an image that a router has named."""
        times = self._times.get(name)
        return name if times is None else f"{name}-{times}"

    def have_failed(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            self._failed[identifier] = None
            name = identifier.partition("-")[0]
            self._times[name] = self._times.pop(name, 0) + 1
        for kept in (self._failed, self._times):
            while len(kept) > _MOST_REMEMBERED:
                kept.popitem(last=False)
        ids = {one.request_id for one in self._running if self._include(one.identifiers)}
        for one in self._running:
            if one.request_id in ids:
                one.failed = True
        if ids:
            self._end(sorted(ids))

    @contextlib.contextmanager
    def watching(self, request_id: str, identifiers: Collection[str]) -> Iterator[Watched]:
        """Watch a request while it runs; raises `ImageNotEncoded` if an image has failed before."""
        if self._include(identifiers):
            raise ImageNotEncoded
        watched = Watched(request_id, identifiers)
        self._running.add(watched)
        try:
            yield watched
        finally:
            self._running.discard(watched)

    def _include(self, identifiers: Iterable[str]) -> bool:
        return not self._failed.keys().isdisjoint(identifiers)
