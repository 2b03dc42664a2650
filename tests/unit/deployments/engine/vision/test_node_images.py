"""Encoded images of a node, as one of its engines finds them."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import PlaceholderRange

from deployments.engine.vision.images import NodeImages, images_of
from deployments.node.arena import ARENA_PATH, make_arena


@pytest.fixture
def path() -> Iterator[str]:
    made = make_arena(1_000_000)
    yield made
    os.close(int(made.rpartition("/")[2]))


def engine(path: str, model: str = "m") -> Any:
    transfer = SimpleNamespace(get_from_extra_config=lambda name, _: {ARENA_PATH: path}.get(name))
    described = SimpleNamespace(model=model, revision=None, dtype="bfloat16")
    return SimpleNamespace(ec_transfer_config=transfer, model_config=described)


def image(tokens: int) -> PlaceholderRange:
    return PlaceholderRange(offset=0, length=tokens)


def test_images_that_another_engine_has_encoded_are_not_missing(path: str) -> None:
    one, other = NodeImages(engine(path)), NodeImages(engine(path))
    asked = [("a", image(10)), ("b", image(20)), ("b", image(20))]
    assert other.missing_tokens(asked) == 30
    one.put("b", b"embeddings")
    assert other.missing_tokens(asked) == 10
    assert other.get("b") == b"embeddings"
    # Of another model it would be something else.
    assert NodeImages(engine(path, "another")).get("b") is None


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_without_memory_every_image_is_missing(path: str) -> None:
    alone = NodeImages(engine(path))
    alone.put("a", b"embeddings")
    assert (alone.get("a"), alone.missing_tokens([("a", image(10))])) == (None, 10)


def test_a_prompts_images_are_all_of_its_media() -> None:
    hashes = {"image": ["a", "b"], "audio": ["c"]}
    places = {"image": [image(1), image(2)], "audio": [image(3)]}
    found = images_of({"mm_hashes": hashes, "mm_placeholders": places})
    assert [(name, place.length) for name, place in found] == [("a", 1), ("b", 2), ("c", 3)]
    assert images_of({"prompt_token_ids": [1]}) == images_of("text") == []
