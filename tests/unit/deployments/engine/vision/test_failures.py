"""Images on which an encoder fails end their turns, and no others."""

import pytest

from deployments.engine.vision.images import FailedImages, ImageNotEncoded, WorkersFailures


def test_failures_are_told_once_and_remembered() -> None:
    failures = WorkersFailures()
    for one in ("bad", "bad too"):
        failures.add(one)
    assert failures.take_untold() == ["bad", "bad too"]
    assert failures.take_untold() == []
    # KV that is computed of these is stored nowhere.
    assert failures.include(["good", "bad"])
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
