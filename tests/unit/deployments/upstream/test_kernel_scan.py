"""vLLM's search for kernels, beside an object that answers any name."""

import sys
from types import ModuleType

import pytest
from vllm.triton_utils import dispatcher


class Anything:
    """As llvmlite's handle of its library: it has a function of any name, and no members."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return self.__getattr__


@pytest.fixture(autouse=True)
def beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("has_anything")
    module.handle = Anything()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatcher, "vars", vars, raising=False)


def test_vllm_fails_at_the_object() -> None:
    with pytest.raises(AttributeError, match="get"):
        dispatcher._rebind_kernels([])


@pytest.mark.usefixtures("patched")
def test_patched_vllm_passes_over_it() -> None:
    dispatcher._rebind_kernels([])
