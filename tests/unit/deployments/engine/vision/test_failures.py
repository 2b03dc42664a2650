"""Images on which an encoder fails end their turns, and no others."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from deployments.engine.vision import failures as module
from deployments.engine.vision.failures import (
    FailedImages,
    ImageNotEncoded,
    WorkersFailures,
    encode_what_can_be,
)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> WorkersFailures:
    own = WorkersFailures()
    monkeypatch.setattr(module, "failures", own)
    return own


REQUESTS = {"a": ["good", "bad"], "b": ["bad too"], "c": ["fine"]}


def images(request_id: str) -> list[Any]:
    place = PlaceholderRange(offset=0, length=3)
    return [SimpleNamespace(identifier=one, mm_position=place) for one in REQUESTS[request_id]]


def encode(inputs: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    encoded: dict[str, torch.Tensor] = {}

    def run(given: Mapping[str, Sequence[int]]) -> None:
        for request_id, numbers in given.items():
            for number in numbers:
                identifier = REQUESTS[request_id][number]
                if identifier.startswith("bad"):
                    raise RuntimeError("out of memory")
                encoded[identifier] = torch.ones(3, 8)

    def zeros(tokens: int, width: int | None) -> torch.Tensor:
        return torch.zeros(tokens, width or 4)

    encode_what_can_be(run, inputs, images, encoded, zeros)
    return encoded


def test_images_that_fail_do_not_keep_others_from_being_encoded(failures: WorkersFailures) -> None:
    encoded = encode({"a": [0, 1], "b": [0], "c": [0]})
    assert {name: bool(one.all()) for name, one in encoded.items()} == {
        "good": True, "bad": False, "bad too": False, "fine": True,
    }  # fmt: skip
    # As wide as the others.
    assert {tuple(one.shape) for one in encoded.values()} == {(3, 8)}
    assert failures.take_untold() == ["bad", "bad too"]
    assert failures.take_untold() == []
    # What is computed of these is stored nowhere.
    assert failures.include(["good", "bad"])
    assert failures.include(["bad too"])
    assert not failures.include(["good", "fine"])


def test_where_all_goes_well_nothing_is_noted(failures: WorkersFailures) -> None:
    assert set(encode({"a": [0], "c": [0]})) == {"good", "fine"}
    assert failures.take_untold() == []
    assert not failures.include(["good", "fine"])


def test_every_request_with_the_image_ends_and_the_next_one_has_another_name_for_it() -> None:
    ended: list[str] = []
    failed = FailedImages(ended.extend)
    with (
        failed.watching("r1", ["one", "two"]) as first,
        failed.watching("r2", ["two"]) as second,
        failed.watching("r3", ["three"]) as third,
    ):
        failed.have_failed(["two"])
        assert ended == ["r1", "r2"]
        for one in (first, second):
            with pytest.raises(ImageNotEncoded):
                one.require_encoded()
        third.require_encoded()
    # It was rendered before the failure was known.
    with pytest.raises(ImageNotEncoded), failed.watching("r5", ["two"]):
        raise AssertionError
    assert [failed.name(name) for name in ("one", "two")] == ["one", "two-1"]
    with failed.watching("r1", ["two-1"]) as again:
        again.require_encoded()
        failed.have_failed(["two-1"])
        assert failed.name("two") == "two-2"


def test_requests_with_the_same_id_end_together_and_each_says_why() -> None:
    """Clients choose ids, and vLLM ends all that have one."""
    ended: list[str] = []
    failed = FailedImages(ended.extend)
    with failed.watching("r", ["one"]) as seeing:
        with failed.watching("r", []):
            pass
        with failed.watching("r", []) as reading:
            failed.have_failed(["one"])
            assert ended == ["r"]
            for one in (seeing, reading):
                with pytest.raises(ImageNotEncoded):
                    one.require_encoded()
