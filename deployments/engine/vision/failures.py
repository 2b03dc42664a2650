"""Ends the turns whose images an encoder fails on, and not their engine.

vLLM 0.29 runs the encoder within an iteration, and an error there ends the engine. With this, the
worker tries each image of that iteration alone, puts zeros in the place of those that fail, and
stores no KV until their requests have ended. The iteration's statistics name them to the engine's
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
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from vllm.exceptions import VLLMUnprocessableEntityError

logger = logging.getLogger("conserve.engine")

_MOST_REMEMBERED = 4_096
# In the connector's configuration: whether the engine's server gets statistics, or needs none since
# it has no KV. What an encoder fails on is encoded by the engine that needs it, which tells.
TELLS = "conserve.statistics"

# --- In the worker --------------------------------------------------------------------------------


class WorkersFailures:
    """Images that this process's worker could not encode."""

    def __init__(self) -> None:
        self.identifiers: set[str] = set()
        self._requests: set[str] = set()
        self._untold: list[str] = []

    @property
    def under_way(self) -> bool:
        """Whether a request runs whose KV may be wrong."""
        return bool(self._requests)

    def add(self, request_id: str, identifier: str) -> None:
        self.identifiers.add(identifier)
        self._requests.add(request_id)
        self._untold.append(identifier)

    def ended(self, request_ids: Iterable[str]) -> None:
        if self._requests:
            self._requests.difference_update(request_ids)

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
                failures.add(request_id, image.identifier)
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


class FailedImages:
    """Images that an engine's workers could not encode, and the requests that have them.

    Args:
        end: ends requests in the engine, by their ids.
    """

    def __init__(self, end: Callable[[Sequence[str]], None]) -> None:
        self._end = end
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._times: OrderedDict[str, int] = OrderedDict()
        self._running: dict[str, list[str]] = {}
        self._ended: set[str] = set()

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
        ended = [id for id, images in self._running.items() if self._failed.keys() & images]
        self._ended.update(ended)
        if ended:
            self._end(ended)

    @contextlib.contextmanager
    def watching(self, request_id: str, identifiers: list[str]) -> Iterator[None]:
        """Watch a request while it runs; raises `ImageNotEncoded` if an image has failed before."""
        if identifiers:
            self._running[request_id] = identifiers
            if self._failed.keys() & identifiers:
                self._ended.add(request_id)
        try:
            self.require_encoded(request_id)
            yield
        finally:
            self._running.pop(request_id, None)
            self._ended.discard(request_id)

    def require_encoded(self, request_id: str) -> None:
        """Raise `ImageNotEncoded` if an image of a request has failed since it began."""
        if request_id in self._ended:
            raise ImageNotEncoded
