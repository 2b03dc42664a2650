"""Ends the turns whose images an encoder fails on, and not their engine.

vLLM 0.29 runs the encoder within an iteration, and an error there ends the engine. With this, the
worker tries each image of that iteration alone, puts zeros in the place of those that fail, and
stores no KV of requests that have one. The iteration's statistics name them to the engine's
server (`FailedImages`), which ends their turns. From then on it has the same image known by another
name, since caches have KV of zeros under the first one.

Workers that share a tower (tensor parallel) wait for each other within it, so there an error still
ends the engine.

Internals of vLLM 0.29 that are used: ``GPUModelRunner._execute_mm_encoder``, ``encoder_cache`` and
``requests``; of its newer runner ``ModelState.execute_mm_encoder`` and ``encoder_cache``.
"""

import contextlib
import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import torch
from vllm.exceptions import VLLMUnprocessableEntityError

logger = logging.getLogger("conserve.engine")

_MOST_REMEMBERED = 4_096
# In the connector's configuration: whether the engine's server gets statistics. An engine that only
# encodes needs none: the engine that needs the image encodes it again, and tells.
TELLS = "conserve.statistics"

# --- In the worker --------------------------------------------------------------------------------


class WorkersFailures:
    """Identifiers of images that this process's worker could not encode.

    KV that was computed of their zeros must not be stored.
    """

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


def survive_encoders() -> None:
    """Change both of vLLM's runners; AttributeError if they are other ones."""
    # The engine's server, which loads this module too, needs no runner.
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    older, newer = GPUModelRunner._execute_mm_encoder, ModelState.execute_mm_encoder

    @functools.wraps(older)
    def encode(runner: Any, scheduled: Any) -> Any:
        if runner.model_config.is_encoder_decoder:
            return older(runner, scheduled)

        def some(inputs: Mapping[str, Sequence[int]]) -> Any:
            return older(runner, dataclasses.replace(scheduled, scheduled_encoder_inputs=inputs))

        return encode_what_can_be(
            some,
            scheduled.scheduled_encoder_inputs,
            lambda request_id: runner.requests[request_id].mm_features,
            runner.encoder_cache,
            functools.partial(_zeros, runner),
        )

    @functools.wraps(newer)
    def encode_newer(state: Any, inputs: Mapping[str, Sequence[int]]) -> None:
        encode_what_can_be(
            functools.partial(newer, state),
            inputs,
            state.encoder_cache.mm_features.__getitem__,
            state.encoder_cache.encoder_outputs,
            functools.partial(_zeros, state),
        )

    GPUModelRunner._execute_mm_encoder = encode
    ModelState.execute_mm_encoder = encode_newer


def encode_what_can_be(
    encode: Callable[[Mapping[str, Sequence[int]]], Any],
    inputs: Mapping[str, Sequence[int]],
    images_of: Callable[[str], Sequence[Any]],
    encoded: MutableMapping[str, torch.Tensor],
    zeros: Callable[[int, int | None], torch.Tensor],
) -> Any:
    """Encode images, each alone if they fail together, and put zeros in the place of those that do.

    Args:
        encode: encodes into ``encoded``, by identifier.
        inputs: numbers of images, by request.
        images_of: returns a request's images.
        zeros: makes this many embeddings of a width; None: of the usual one.
    """
    try:
        return encode(inputs)
    except Exception as error:
        # Another one follows for each image that is the cause.
        logger.warning("images are encoded one by one, since together they fail: %s", error)
    for request_id, numbers in inputs.items():
        for number in numbers:
            image = images_of(request_id)[number]
            try:
                encode({request_id: [number]})
            except Exception:
                logger.exception("an image of request %s cannot be encoded", request_id)
                failures.add(image.identifier)
                # Some models' embeddings are wider than what their language model takes.
                width = next((one.shape[-1] for one in encoded.values()), None)
                encoded[image.identifier] = zeros(image.mm_position.get_num_embeds(), width)
    return []


def _zeros(runner: Any, tokens: int, width: int | None) -> torch.Tensor:
    model = runner.model_config
    width = width or model.get_inputs_embeds_size()
    return torch.zeros(tokens, width, dtype=model.dtype, device=runner.device)


# --- In the engine's server -----------------------------------------------------------------------


class ImageNotEncoded(VLLMUnprocessableEntityError):  # type: ignore[misc]  # To mypy it is Any.
    """A turn cannot be answered, since an image of its prompt could not be encoded (422)."""

    def __init__(self) -> None:
        super().__init__(
            "an image of this request could not be encoded, and the engine's log says why; send "
            "another image, or a smaller one"
        )


class Watched:
    """A request that runs, with the identifiers of its images."""

    __slots__ = ("_failed", "identifiers", "request_id")

    def __init__(self, request_id: str, identifiers: Collection[str]) -> None:
        self.request_id = request_id
        self.identifiers = identifiers
        self._failed = False

    def fail(self) -> None:
        self._failed = True

    def require_encoded(self) -> None:
        """Raise `ImageNotEncoded` if the request was ended because an image has failed."""
        if self._failed:
            raise ImageNotEncoded


class FailedImages:
    """Images that an engine's workers could not encode, and the requests that have them.

    Args:
        end: ends requests in the engine, by their ids. Clients choose these, so several requests
            may have the same one, and end together.
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
                one.fail()
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
