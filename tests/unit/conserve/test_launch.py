"""Waiting for an application: what it waits for, and how long each part takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve import launch
from conserve.launch import Launch

_STATES: list[dict[str, Any]] = [
    {},
    {},
    {"prefillers": 0, "decoders": 0},
    {"prefillers": 0, "decoders": 0, "starting": {"starting engines": 2}},
    {"prefillers": 0, "decoders": 0, "starting": {"starting engines": 2, "warming up": 1}},
    {"prefillers": 1, "decoders": 0, "starting": {"warming up": 2}},
    {"prefillers": 1, "decoders": 2},
]


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """An application that comes up in seven looks, a second each."""
    states, seconds = iter(_STATES), iter(range(1000))
    monkeypatch.setattr(launch, "health", lambda url: next(states))
    monkeypatch.setattr(launch.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(launch.time, "sleep", lambda s: None)
    monkeypatch.setattr(Launch, "running", property(lambda self: True))
    return Launch([], Path("unused"))


def test_a_start_says_what_it_waits_for_and_how_long_it_did(application: Launch) -> None:
    said: list[str] = []
    phases = application.wait_until_serving("http://unused", 1, 2, on_progress=said.append)
    assert said == [
        "starting Ray and Serve",
        "starting Ray and Serve",
        "loading vLLM (0 of 3 engines ready)",
        "loading vLLM (0 of 3 engines ready)",
        "starting engines (0 of 3 engines ready)",
        "warming up (1 of 3 engines ready)",
    ]
    assert list(phases) == [
        "starting Ray and Serve", "loading vLLM", "starting engines", "warming up",
    ]  # fmt: skip
    assert all(took_s > 0 for took_s in phases.values())
