"""A tower whose layers take turns is never on the GPU as a whole, not even while its model loads.

PyTorch's fake tensors stand in for those of a GPU. They have no values: that a loaded model answers
as it should is seen in `tests/engines/vision/test_offload.py`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from vllm.config import LoadConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader
from vllm.model_executor.layers import rotary_embedding, utils
from vllm.model_executor.offloader import get_offloader

from conserve_inside.tower import loading
from conserve_inside.tower.loading import load_with_tower_on_host
from tests.engines.vision.model import DEEP, make_vision_model

GPU = "cuda"


class Gpu(TorchFunctionMode):
    """Notes how much memory tensors on a GPU have taken."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most_bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            # Fake tensors miss that they have moved.
            args[0].fake_device = args[1].fake_device
        there = {key: one for key, one in self._taken.items() if not one[0].expired()}
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.device.type == GPU:
                storage = one.untyped_storage()
                there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._taken = there
        self.most_bytes = max(self.most_bytes, sum(size for _, size in there.values()))
        return found


class Unread(model_loader.BaseModelLoader):  # type: ignore[misc]
    """Has vLLM build a model and process its weights, and reads none."""

    def download_model(self, *_: Any) -> None: ...
    def load_weights(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what would look at a GPU, or copy what has no values."""
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Unread)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    monkeypatch.setattr(loading, "offload", lambda model, kept, _: setattr(model, "kept", kept))
    # On a CPU vLLM would pack weights.
    monkeypatch.setattr(ops, "_supports_onednn", False)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)


def loaded(folder: Path, kept: int | None) -> tuple[dict[str, torch.Tensor], int]:
    """Return a model's tensors, and the most memory that they took on the GPU meanwhile."""
    arguments = EngineArgs(str(folder), dtype="float32", enforce_eager=True, max_model_len=2048)
    config = arguments.create_engine_config()
    config.load_config.device = f"{GPU}:0"
    if kept is not None:
        load_with_tower_on_host(config, kept)
    gpu = Gpu()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/{kept}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        with FakeTensorMode(), gpu:
            model = model_loader.get_model(vllm_config=config)
    parallel_state.cleanup_dist_env_and_memory()
    rotary_embedding._ROPE_DICT.clear()
    return dict((*model.named_parameters(), *model.named_buffers())), gpu.most_bytes


def test_a_gpu_has_one_layer_of_the_tower_at_a_time(tmp_path: Path) -> None:
    """With a model of vLLM's that builds its tower and its language model together."""
    make_vision_model(tmp_path, DEEP)
    whole, whole_bytes = loaded(tmp_path, None)
    assert {one.device.type for one in whole.values()} == {GPU}
    tower = {name for name in whole if ".vision_model.encoder.layers." in name}
    tower_bytes = sum(whole[name].nbytes for name in tower)
    parts, most_bytes = loaded(tmp_path, 2)
    assert {name for name, one in parts.items() if one.device.type == "cpu"} == tower
    assert most_bytes <= whole_bytes - tower_bytes + tower_bytes // DEEP.layers


class Model(nn.Module):
    """Has modules of one class in its tower, beside it, and in its language model."""

    _tower_model_names = ("visual",)

    def __init__(self) -> None:
        super().__init__()
        made = get_offloader().wrap_modules(nn.Sequential(nn.RMSNorm(2)) for _ in range(3))
        # They have not left the GPU meanwhile.
        assert {one[0].weight.device.type for one in made} == {GPU}
        self.language = nn.ModuleList(made)
        self.visual = nn.Module()
        self.visual.mergers = nn.ModuleList(nn.RMSNorm(2) for _ in range(3))
        self.visual.layers = nn.ModuleList(nn.RMSNorm(2) for _ in range(4))


class Built(Unread):
    def load_model(self, *given: Any) -> nn.Module:
        return self.create_model(*given)

    def create_model(self, *_: Any) -> nn.Module:
        with torch.device(GPU):
            return Model()


def test_only_the_towers_layers_stay_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Built)
    config: Any = SimpleNamespace(model_config=object(), load_config=LoadConfig(device=GPU))
    load_with_tower_on_host(config, 2)
    with FakeTensorMode(), Gpu():
        model: Any = model_loader.get_model(vllm_config=config)
    parts = (model.visual.layers, model.visual.mergers, model.language)
    places = [{one.device.type for one in part.parameters()} for part in parts]
    assert places == [{"cpu"}, {GPU}, {GPU}]


def test_a_format_that_builds_models_itself_is_refused() -> None:
    config: Any = SimpleNamespace(
        model_config=None, load_config=SimpleNamespace(load_format="tensorizer", device="cpu")
    )
    with pytest.raises(RuntimeError, match=r"engine\.load_format=tensorizer loads all layers"):
        load_with_tower_on_host(config, 2)
