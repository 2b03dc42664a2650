"""An engine's adapters: loaded once, before a turn runs, from files that nobody changes."""

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from conserve.adapters import Adapter, adapter_in, digest_of
from conserve.embedded import model_path
from deployments.engine import turns
from deployments.engine.adapters import EngineAdapters
from deployments.engine.check import Check
from tests.adapter_files import make_adapter
from tests.unit.deployments.engine.following import engine_turns
from tests.unit.hetero.planned import written
from tests.unit.hetero.shapes import QWEN3_8B


class Client:
    """vLLM's, which takes note of adapters and of what they are at that moment."""

    def __init__(self, most: int = 2) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_cpu_loras=most))
        self.added: list[Any] = []
        self.ran: list[Any] = []
        self.input_processor = SimpleNamespace(process_inputs=self._judged)

    async def add_lora(self, lora: Any) -> None:
        await asyncio.sleep(0)
        if len(self.added) == 5:
            raise RuntimeError("its rank is too great")
        self.added.append((lora.lora_name, lora.lora_int_id, digest_of(Path(lora.lora_path))))

    async def generate(self, *_: Any, lora_request: Any = None, **__: Any) -> Any:
        self.ran.append(lora_request)
        for one in ():
            yield one

    def _judged(self, *_: Any, lora_request: Any, **__: Any) -> Any:
        return SimpleNamespace(prompt_token_ids=[1], mm_features=None)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def made(temporary: Path) -> list[Adapter]:
    folders = [make_adapter(temporary / name, model_path(), ord(name)) for name in "abc"]
    return [adapter_in(folder.name, str(folder)) for folder in folders]


async def test_an_adapter_is_loaded_once_by_its_first_turn(made: list[Adapter]) -> None:
    client = Client()
    adapters = EngineAdapters(client, "embedded")
    a, b, c = (one.model for one in made)
    assert "conserve-embedded" not in adapters
    # A client is told its own name, and vLLM one that no other adapter has.
    assert adapters[a].lora_name == "a"
    first, again, other = await asyncio.gather(*map(adapters.loaded, (a, a, b)))
    assert first is again
    assert client.added == [
        (f"{one.name}@{one.digest}", number, one.digest) for number, one in enumerate(made[:2], 1)
    ]
    assert (first.lora_int_id, other.lora_int_id) == (adapters[a].lora_int_id, 2)
    assert len(adapters.take_loads()) == 2
    assert adapters.take_loads() == ()
    # The engine keeps two.
    await adapters.loaded(a)
    await adapters.loaded(c)
    assert adapters.ids == (made[0].id, made[2].id)
    await adapters.loaded(b)
    assert len(client.added) == 4


async def test_files_that_changed_are_not_loaded_and_what_was_loaded_stays(
    made: list[Adapter], temporary: Path
) -> None:
    client = Client()
    adapters = EngineAdapters(client, "embedded")
    folder = Path(made[0].path)
    lora = await adapters.loaded(made[0].model)
    make_adapter(folder, model_path(), 7)
    assert digest_of(Path(lora.lora_path)) == made[0].digest
    with pytest.raises(VLLMValidationError, match="has changed since it was added"):
        await EngineAdapters(client, "embedded").loaded(made[0].model)
    # Under its new digest it is another one, which runs beside it.
    changed = adapter_in("a", str(folder))
    assert (await adapters.loaded(changed.model)).lora_name != lora.lora_name
    other = adapter_in("a", str(make_adapter(folder, written(temporary, QWEN3_8B), 7)))
    with pytest.raises(VLLMValidationError, match="a is of another model"):
        await adapters.loaded(other.model)


async def test_turns_run_with_it_and_checks_load_nothing(made: list[Adapter]) -> None:
    client: Any = Client()
    adapters = EngineAdapters(client, "embedded")
    app = engine_turns(None, client, adapters=adapters, tasks=("generate",))
    model = made[0].model
    for check in (Check("/v1/completions", prefills=False), None):
        turns._current.set(check)
        asked = {"prompt_token_ids": [1]}, SamplingParams(max_tokens=1), "r"
        async for _ in app.client.generate(*asked, lora_request=adapters[model]):
            pass
        assert len(client.added) == len(client.ran) == (check is None)
    assert client.ran[0].lora_name == f"a@{made[0].digest}"
