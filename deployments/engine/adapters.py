"""Loads the adapters (LoRA) that an engine's requests name, each before its first request runs."""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from conserve.adapters import CONFIG, WEIGHTS, Adapter, AdapterError, digest_of, of_model
from conserve.launch import ended, hold
from deployments.model_files import require_adapter

logger = logging.getLogger("ray.serve")

_FOLDER, _LOCK = "conserve-adapters-", "conserve.lock"


class EngineAdapters(Mapping[str, LoRARequest]):
    """The adapters of requests' models, in the place of vLLM's own table of those that are loaded.

    vLLM asks it as it reads a request. That loads nothing, so a request that is only checked does
    not either; `loaded` does, before a request runs. An adapter is loaded from a copy of its
    folder, so that vLLM, which may read it again at any time, gets the weights that its KV is of.

    Args:
        client: vLLM's ``AsyncLLM``.
        model: the setting.
    """

    def __init__(self, client: Any, model: str) -> None:
        self._client, self._model = client, model
        self._most = client.vllm_config.lora_config.max_cpu_loras
        self._ids: dict[str, int] = {}
        self._loaded: OrderedDict[str, LoRARequest] = OrderedDict()
        self._loading = asyncio.Lock()
        self._took_s: list[float] = []
        folder = Path(tempfile.gettempdir())
        for mark in ended(folder.glob(f"{_FOLDER}*/{_LOCK}")):
            shutil.rmtree(mark.parent, ignore_errors=True)
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        hold(os.open(self._folder / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600))

    def __getitem__(self, model: str) -> LoRARequest:
        adapter = of_model(model)
        if adapter is None:
            raise KeyError(model)
        number = self._ids.setdefault(model, len(self._ids) + 1)
        return LoRARequest(adapter.name, number, model)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    async def loaded(self, model: str) -> LoRARequest:
        """Return what the engine is told of an adapter, once it has it.

        Raises:
            VLLMValidationError: it cannot be loaded.
        """
        if model not in self._loaded:
            async with self._loading:
                if model not in self._loaded:
                    self._loaded[model] = await self._load(model)
                if len(self._loaded) > self._most:
                    # As in the engine, which reads it again if it is still used.
                    self._loaded.popitem(last=False)
        self._loaded.move_to_end(model)
        return self._loaded[model]

    async def _load(self, model: str) -> LoRARequest:
        adapter, began_s = of_model(model), time.monotonic()
        assert adapter is not None
        try:
            path = await asyncio.to_thread(self._copied, adapter)
            # vLLM takes two of one name for one.
            lora = LoRARequest(adapter.id, self[model].lora_int_id, str(path))
            await self._client.add_lora(lora)
        except EngineDeadError:
            raise
        except Exception as error:
            said = f"the adapter {adapter.name} cannot be loaded: {error}"
            logger.warning("%s", said)
            raise VLLMValidationError(said) from None
        self._took_s.append(time.monotonic() - began_s)
        return lora

    def _copied(self, adapter: Adapter) -> Path:
        folder, own = Path(adapter.path), self._folder / adapter.digest
        own.mkdir(exist_ok=True)
        for name in (CONFIG, *WEIGHTS):
            if (folder / name).exists():
                shutil.copyfile(folder / name, own / name)
        if digest_of(own) != adapter.digest:
            shutil.rmtree(own)
            raise AdapterError(f"{folder} has changed since it was added; add it anew")
        require_adapter(adapter.name, own, self._model)
        return own

    def take_loads(self) -> tuple[float, ...]:
        """Return how long the adapters took that were loaded since it was last asked for."""
        took_s, self._took_s = self._took_s, []
        return tuple(took_s)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return those of the adapters that the engine has."""
        return tuple(one.lora_name for one in self._loaded.values())
