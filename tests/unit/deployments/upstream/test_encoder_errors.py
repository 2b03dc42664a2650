"""An image on which an encoder fails ends the whole step, or is replaced by zeros."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deployments.upstream.encoder_errors import survive_encoders

REQUESTS = {"a": ["good", "bad"], "b": ["bad too"], "c": ["fine"]}
ALL = {"a": [0, 1], "b": [0], "c": [0]}
PLACE = PlaceholderRange(offset=0, length=3)
IMAGES = {
    request: [SimpleNamespace(identifier=one, mm_position=PLACE) for one in identifiers]
    for request, identifiers in REQUESTS.items()
}
MODEL = SimpleNamespace(
    is_encoder_decoder=False, dtype=torch.float32, get_inputs_embeds_size=lambda: 4
)


@dataclasses.dataclass
class Scheduled:
    scheduled_encoder_inputs: dict[str, list[int]]


class Encoder:
    """The encoder of vLLM's second runner: it cannot encode what is bad."""

    def prepare_mm_inputs(self, inputs: Mapping[str, Sequence[int]]) -> Any:
        found = [REQUESTS[name][number] for name, numbers in inputs.items() for number in numbers]
        return found, found

    def timed_encoder_operation(self, requests: Any) -> Any:
        return contextlib.nullcontext()

    def execute_mm_encoder(self, images: Sequence[str]) -> list[torch.Tensor]:
        if any(one.startswith("bad") for one in images):
            raise RuntimeError("out of memory")
        return [torch.ones(3, 8) for _ in images]


def encoded(inputs: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Return what vLLM's second runner encodes in a step, by its own code."""
    state: Any = SimpleNamespace(
        encoder_runner=Encoder(), model_config=MODEL, device="cpu",
        encoder_cache=SimpleNamespace(mm_features=IMAGES, encoder_outputs={}),
    )  # fmt: skip
    ModelState.execute_mm_encoder(state, inputs)
    outputs: dict[str, torch.Tensor] = state.encoder_cache.encoder_outputs
    return outputs


def encoded_by_the_first(inputs: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    runner: Any = SimpleNamespace(
        requests={name: SimpleNamespace(mm_features=images) for name, images in IMAGES.items()},
        encoder_cache={}, model_config=MODEL, device="cpu",
    )  # fmt: skip
    GPUModelRunner._execute_mm_encoder(runner, Scheduled(inputs))
    outputs: dict[str, torch.Tensor] = runner.encoder_cache
    return outputs


def first_runner(runner: Any, scheduled: Scheduled) -> None:
    images, _ = Encoder().prepare_mm_inputs(scheduled.scheduled_encoder_inputs)
    runner.encoder_cache.update(zip(images, Encoder().execute_mm_encoder(images), strict=True))


@pytest.fixture(autouse=True)
def as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUModelRunner, "_execute_mm_encoder", first_runner)


def test_an_image_ends_vllms_step() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        encoded(ALL)


@pytest.mark.parametrize("encode", [encoded, encoded_by_the_first])
def test_images_that_fail_do_not_keep_others_from_being_encoded(encode: Any) -> None:
    failed: list[str] = []
    survive_encoders(failed.append)
    found = encode(ALL)
    assert {name: bool(one.all()) for name, one in found.items()} == {
        "good": True, "bad": False, "bad too": False, "fine": True,
    }  # fmt: skip
    # As wide as the others.
    assert {tuple(one.shape) for one in found.values()} == {(3, 8)}
    assert failed == ["bad", "bad too"]
    assert encode({"b": [0]})["bad too"].shape == (3, 4)
