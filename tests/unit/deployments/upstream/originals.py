"""Another project's own code, as it is before any test has a patch applied."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from deployments.upstream.patch import Patch


def unpatched(*patches: Patch, then: bool = False) -> Callable[..., None]:
    """Return a fixture that puts patches' seams back as they were when this was called.

    A test file calls it as it is loaded. Its tests start without the patches, and may apply them;
    afterwards all is as it was before.

    Args:
        then: whether the fixture applies them at once.
    """
    found: list[tuple[Any, str, Any]] = []
    for seam in (seam for patch in patches for seam in patch.seams):
        module, _, path = seam.partition(":")
        owner = importlib.import_module(module)
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        member = inspect.getattr_static(owner, name, None)
        # None: instances alone have it.
        if member is not None:
            found.append((owner, name, member))

    @pytest.fixture(autouse=True)
    def restored(monkeypatch: pytest.MonkeyPatch) -> None:
        for owner, name, member in found:
            monkeypatch.setattr(owner, name, member)
        for patch in patches if then else ():
            assert patch.apply is not None
            patch.apply()

    return restored
