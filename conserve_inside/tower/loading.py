"""Loads a model's vision tower into host memory, where its layers stay (`offload`).

vLLM builds a model on the GPU and then reads weights into it. Here each layer of the tower is moved
to host memory once it is built, so its weights are read into that. vLLM itself takes a module to
the GPU and back to pack or quantise its weights (`device_loading_context`). So the GPU has, beside
the rest of the model, one layer as it is built, and later one module as it is processed. Buffers,
and weights that vLLM quantises as it reads them, are there until all is loaded.

A module is built when the next one of its class begins. The language model's layers pass through
vLLM's offloader (`make_layers`), so they stay. Which modules are the tower's layers is known when
the model is built; the others are moved back.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.offloader import BaseOffloader, get_offloader, set_offloader

from conserve_inside.tower.offload import layers_of_tower, offload

# Formats of vLLM's whose loaders do not call `create_model`.
_BUILD_THEMSELVES = ("tensorizer", "ipc_cache", "modelexpress")


def load_with_tower_on_host(vllm_config: Any, kept: int) -> None:
    """Replace this process's loader by one that keeps ``kept`` layers of the tower on the GPU."""
    own, config = vllm_config.model_config, vllm_config.load_config
    if config.load_format in _BUILD_THEMSELVES:
        raise RuntimeError(
            f"media.tower_layers: engine.load_format={config.load_format} loads all layers on the "
            "GPU; unset one of them"
        )
    device = torch.device(config.device or vllm_config.device_config.device)

    class Loader(type(get_model_loader(config))):  # type: ignore[misc]
        # It loads a drafter, too.
        def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            if model_config is not own:
                return super().create_model(vllm_config, model_config, prefix)
            moving = _Moving(get_offloader(), device.type)
            set_offloader(moving)
            try:
                with register_module_module_registration_hook(moving.begins):
                    model = super().create_model(vllm_config, model_config, prefix)
            finally:
                set_offloader(moving.other)
            moving.settle(model, kept)
            return model

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            model = super().load_model(vllm_config, model_config, prefix)
            if model_config is own:
                offload(model, kept, torch.empty(0, device=device).device)
            return model

    register_model_loader(config.load_format)(Loader)


class _Moving(BaseOffloader):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Moves modules to host memory as they are built, but for those of language models."""

    def __init__(self, other: BaseOffloader, device_type: str) -> None:
        self.other, self._type = other, device_type
        # Parameters that are in host memory, and where they were.
        self._moved: dict[nn.Parameter, torch.device] = {}
        self._last: dict[type, nn.Module] = {}
        self._in_language_model = False

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> Any:
        self._in_language_model = True
        modules = self.other.wrap_modules(modules_generator, prefix)
        self._in_language_model = False
        return modules

    def begins(self, module: nn.Module, *_: Any) -> None:
        """Move the last module of this class, unless it is this one: a hook of PyTorch."""
        if not self._in_language_model:
            last = self._last.get(type(module), module)
            self._last[type(module)] = module
            if last is not module:
                self._move(last)

    def settle(self, model: nn.Module, kept: int) -> None:
        """Leave all layers of the tower in host memory, and nothing else."""
        _, layers = layers_of_tower(model)
        if kept >= len(layers):
            layers = nn.ModuleList()
        self._move(layers)
        stays = set(layers.parameters())
        if any(one not in self._moved and one.device.type == "cpu" for one in stays):
            raise RuntimeError(
                f"media.tower_layers: the tower's weights are not on the {self._type}; unset it, "
                "or what puts them elsewhere (engine.cpu_offload_gb)"
            )
        for one in model.parameters():
            if one in self._moved and one not in stays:
                one.data = one.data.to(self._moved[one])

    def _move(self, module: nn.Module) -> None:
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            if any(one.is_meta for one in own):
                # vLLM quantises these on the GPU as it reads them.
                continue
            for one in own:
                if one.device.type == self._type and one not in self._moved:
                    self._moved[one] = one.device
                    # Also within host memory, so that tests on CPUs run it.
                    one.data = torch.empty_like(one.data, device="cpu").copy_(one.data)
