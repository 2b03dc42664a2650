"""Another project's own code, as it is before any test has a patch applied."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.upstream.patch import Patch

# A module or a class, the name of its member, and the member.
Own = tuple[Any, str, Any]


def members(*patches: Patch) -> list[Own]:
    """Return what patches' seams are now, and the classes that have them."""
    return [one for patch in patches for seam in patch.seams for one in _along(seam)]


def _along(seam: str) -> Iterator[Own]:
    module, _, path = seam.partition(":")
    owner = importlib.import_module(module)
    for name in path.split("."):
        member = inspect.getattr_static(owner, name, None)
        # None: instances alone have it.
        if member is not None:
            yield owner, name, member
        owner = getattr(owner, name, None)


def put_back(monkeypatch: pytest.MonkeyPatch, own: list[Own]) -> None:
    """Put members back for a test; afterwards all is as it was before the test."""
    for owner, name, member in own:
        monkeypatch.setattr(owner, name, member)


def apply(*patches: Patch) -> None:
    for patch in patches:
        importlib.import_module(f"deployments.upstream.{patch.name}").apply()


def unpatched(*patches: Patch, then: bool = False) -> Callable[..., None]:
    """Return a fixture by which the tests of a file in another folder start without patches.

    The file calls it as it is loaded.

    Args:
        then: whether the fixture applies the patches at once.
    """
    own = members(*patches)

    @pytest.fixture(autouse=True)
    def restored(monkeypatch: pytest.MonkeyPatch) -> None:
        put_back(monkeypatch, own)
        if then:
            apply(*patches)

    return restored
