"""Has one image on which an encoder fails not end its engine.

vLLM runs encoders within an iteration, and an error there ends the engine. With this, the worker
tries each image of that iteration alone, and puts zeros in the place of those that fail.

Workers that share a tower (tensor parallel) wait for each other within it, so there an error still
has to end the engine.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from deployments.upstream.patch import Patch, of

logger = logging.getLogger("conserve.engine")

Failed = Callable[[str], None]


def survive_encoders(failed: Failed) -> None:
    """Change both of vLLM's runners; ``failed`` is told the identifiers of images that fail."""
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    older, newer = GPUModelRunner._execute_mm_encoder, ModelState.execute_mm_encoder

    @functools.wraps(older)
    def encode(runner: Any, scheduled: Any) -> Any:
        if runner.model_config.is_encoder_decoder:
            return older(runner, scheduled)

        def some(inputs: Mapping[str, Sequence[int]]) -> Any:
            return older(runner, dataclasses.replace(scheduled, scheduled_encoder_inputs=inputs))

        def images_of(request_id: str) -> Sequence[Any]:
            images: Sequence[Any] = runner.requests[request_id].mm_features
            return images

        inputs, encoded = scheduled.scheduled_encoder_inputs, runner.encoder_cache
        return _encode_what_can_be(some, inputs, images_of, encoded, runner, failed)

    @functools.wraps(newer)
    def encode_newer(state: Any, inputs: Mapping[str, Sequence[int]]) -> None:
        cache = state.encoder_cache
        images_of, encoded = cache.mm_features.__getitem__, cache.encoder_outputs
        some = functools.partial(newer, state)
        _encode_what_can_be(some, inputs, images_of, encoded, state, failed)

    GPUModelRunner._execute_mm_encoder = encode
    ModelState.execute_mm_encoder = encode_newer


def _encode_what_can_be(
    encode: Callable[[Mapping[str, Sequence[int]]], Any],
    inputs: Mapping[str, Sequence[int]],
    images_of: Callable[[str], Sequence[Any]],
    encoded: MutableMapping[str, Any],
    runner: Any,
    failed: Failed,
) -> Any:
    """Encode images, given as numbers by request, into ``encoded``, by identifier."""
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
                failed(image.identifier)
                # Some models' embeddings are wider than what their language model takes.
                width = next((one.shape[-1] for one in encoded.values()), None)
                tokens = image.mm_position.get_num_embeds()
                encoded[image.identifier] = _zeros(runner, tokens, width)
    return []


def _zeros(runner: Any, tokens: int, width: int | None) -> Any:
    import torch

    model = runner.model_config
    width = width or model.get_inputs_embeds_size()
    return torch.zeros(tokens, width, dtype=model.dtype, device=runner.device)


_NEWER = "vllm.v1.worker.gpu"
PATCH = Patch(
    name="encoder_errors",
    seams=(
        *of(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
            "_execute_mm_encoder encoder_cache requests",
        ),
        *of(f"{_NEWER}.model_states.interface:ModelState", "execute_mm_encoder encoder_cache"),
        *of(f"{_NEWER}.mm.encoder_cache:EncoderCache", "mm_features encoder_outputs"),
    ),
    why="one image on which an encoder fails ends the engine, with all its turns and its KV",
    upstream="vllm#55546, vllm#43473, vllm#52654",
    process="engine",
)
