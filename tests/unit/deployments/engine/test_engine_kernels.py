"""The plugin that keeps GPU engines from kernels that their node cannot compile, or load."""

import inspect
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerWrapperBase

from deployments.engine import engine_kernels
from deployments.engine.engine_kernels import (
    attention_backends,
    find_nvcc,
    has_prebuilt_flashinfer,
    kernel_environment,
    require_cuda_ops,
)

SAMPLER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0"}
SWITCHES = [*SAMPLER, *DEEP_GEMM]
PROGRAMS = str(Path(sys.executable).parent)
ON_PATH = {"PATH": f"/usr/bin:{PROGRAMS}"}


@pytest.mark.parametrize(
    ("nvcc", "prebuilt", "expected"),
    [
        (False, False, SAMPLER | DEEP_GEMM),
        (False, True, DEEP_GEMM),
        (True, False, SAMPLER),
        (True, True, {}),
    ],
)
def test_kernels_that_cannot_be_compiled_are_off(
    nvcc: bool, prebuilt: bool, expected: dict[str, str]
) -> None:
    assert kernel_environment(ON_PATH, nvcc=nvcc, prebuilt=prebuilt) == expected


def test_an_operators_own_values_stay() -> None:
    own = ON_PATH | {"VLLM_USE_FLASHINFER_SAMPLER": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    found = kernel_environment(own, nvcc=False, prebuilt=False)
    assert found == {"VLLM_USE_DEEP_GEMM": "0"}


def test_installed_programs_are_found_after_the_machines_own() -> None:
    found = kernel_environment({"PATH": "/opt/bin:/bin"}, nvcc=True, prebuilt=True)
    assert found == {"PATH": f"/opt/bin:/bin:{PROGRAMS}"}
    assert kernel_environment({}, nvcc=True, prebuilt=True)["PATH"].endswith(f":{PROGRAMS}")


def _with_nvcc(home: Path) -> Path:
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    return home


def test_nvcc_is_looked_for_where_flashinfer_and_deep_gemm_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, empty = tmp_path / "usual", tmp_path / "empty"
    monkeypatch.setattr(engine_kernels, "_USUAL_CUDA_HOME", str(usual))
    toolkit = _with_nvcc(tmp_path / "toolkit")
    nowhere = {"PATH": str(empty)}
    assert not find_nvcc(nowhere)
    for found in (
        {"PATH": str(toolkit / "bin")},
        nowhere | {"CUDA_HOME": str(toolkit)},
        nowhere | {"CUDA_PATH": str(toolkit)},
    ):
        assert find_nvcc(found)
    # They believe the variable, whatever else there is.
    assert not find_nvcc({"PATH": str(toolkit / "bin"), "CUDA_HOME": str(empty)})
    _with_nvcc(usual)
    assert find_nvcc(nowhere)


def test_compiled_kernels_of_flashinfer_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_prebuilt_flashinfer()
    (tmp_path / "flashinfer_jit_cache").mkdir()
    (tmp_path / "flashinfer_jit_cache" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert has_prebuilt_flashinfer()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A node with a driver and no toolkit; what the plugin sets is taken back."""
    for name in (*SWITCHES, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engine_kernels, "_USUAL_CUDA_HOME", str(tmp_path))
    for module in attention_backends():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        del sys.modules[module]
    envs.disable_envs_cache()
    return monkeypatch


def _on_cuda(patch: pytest.MonkeyPatch, answer: bool = True) -> None:
    patch.setattr(type(current_platform), "is_cuda", lambda *_: answer)


def test_an_engine_on_a_gpu_has_them_off(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _on_cuda(bare)
    bare.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    engine_kernels.register()
    first = dict(os.environ)
    engine_kernels.register()
    assert dict(os.environ) == first
    assert not any(getattr(envs, name) for name in SWITCHES)
    assert os.environ["PATH"] == f"{tmp_path}:{Path(sys.executable).parent}"
    assert "VLLM_USE_DEEP_GEMM=0" in caplog.text


def test_without_a_compiler_vllm_takes_attention_that_needs_none(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On Blackwell FlashInfer comes first, and is chosen though nothing could compile it."""
    bare.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase

    _on_cuda(bare)
    asked = AttentionSelectorConfig(128, torch.bfloat16, None, 16)
    blackwell = DeviceCapability(10, 0)

    def chosen() -> list[str]:
        valid, _ = CudaPlatformBase.get_valid_backends(blackwell, asked, 32)
        return [one.backend.name for one in valid]

    usable = SimpleNamespace(validate_configuration=lambda **_: [])
    found = AttentionBackendEnum.FLASHINFER.get_path()
    backend: Any = ModuleType(found.rpartition(".")[0])
    setattr(backend, found.rpartition(".")[2], usable)
    bare.setitem(sys.modules, backend.__name__, backend)
    assert chosen()[0] == "FLASHINFER"
    del sys.modules[backend.__name__]
    engine_kernels.register()
    assert "FLASHINFER" not in chosen()
    # Who compiles, or says that it can be done, keeps it.
    for name, value in (("CUDA_HOME", str(_with_nvcc(tmp_path / "cuda"))),
                        ("VLLM_USE_FLASHINFER_SAMPLER", "1")):  # fmt: skip
        bare.setenv(name, value)
        del sys.modules[backend.__name__]
        engine_kernels.register()
        assert backend.__name__ not in sys.modules
        bare.delenv(name)
        sys.modules[backend.__name__] = backend


def test_an_engine_on_a_cpu_is_left_as_it_is(bare: pytest.MonkeyPatch) -> None:
    _on_cuda(bare, answer=False)
    before = dict(os.environ)
    engine_kernels.register()
    assert dict(os.environ) == before


# From here on: that vLLM still is what the plugin takes it for. If one of these fails with a new
# vLLM, find out which kernels it compiles on the node by default, and adapt engine_kernels.py.


def test_vllm_has_the_switches_and_they_are_on(bare: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        assert getattr(envs, name) is True
        bare.setenv(name, "0")
        assert getattr(envs, name) is False


@pytest.mark.parametrize(
    ("where", "later"),
    [
        (EngineArgs.__post_init__, None),
        (EngineCore.__init__, "enable_envs_cache()"),
        (WorkerWrapperBase.init_worker, "resolve_obj_by_qualname("),
    ],
)
def test_vllm_loads_plugins_in_each_process_before_it_reads_the_switches(
    where: Any, later: str | None
) -> None:
    source = inspect.getsource(where)
    loads = source.index("load_general_plugins()")
    assert later is None or loads < source.index(later)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        (
            "max_split_size_mb:64, expandable_segments : True ,garbage_collection_threshold:0.8",
            "max_split_size_mb:64, expandable_segments : False ,garbage_collection_threshold:0.8",
        ),
        ("expandable_segments:False", None),
        ("max_split_size_mb:64", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cannot_be_shared_is_not_used(
    name: str, given: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else of the allocator's settings is changed."""
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setenv(name, given)
    engine_kernels.register()
    assert os.environ[name] == (given if expected is None else expected)


def test_a_pytorch_that_they_do_not_load_with_is_refused_in_a_line() -> None:
    """Really so here: it has no CUDA."""
    with pytest.raises(RuntimeError) as refused:
        require_cuda_ops()
    (line,) = str(refused.value).splitlines()
    # What does not fit, and what would.
    assert "LMCache 0.5.6" in line
    assert "PyTorch 2.13.0+cpu" in line
    assert "Install the PyTorch that vLLM pins" in line
