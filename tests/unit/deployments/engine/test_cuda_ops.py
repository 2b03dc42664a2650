"""LMCache's CUDA operations, which this machine's PyTorch cannot load."""

import sys
from types import ModuleType

import pytest

from deployments.engine.engine_kernels import require_cuda_ops


def test_a_pytorch_that_they_do_not_load_with_is_refused_in_a_line() -> None:
    """Really so here: it has no CUDA."""
    with pytest.raises(RuntimeError) as refused:
        require_cuda_ops()
    (line,) = str(refused.value).splitlines()
    # What does not fit, and what would.
    assert "LMCache 0.5.6" in line
    assert "PyTorch 2.13.0+cpu" in line
    assert "Install torch==2.13.0" in line


def test_where_they_load_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", ModuleType("lmcache.cuda_ops"))
    require_cuda_ops()
