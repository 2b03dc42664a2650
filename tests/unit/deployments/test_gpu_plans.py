"""Plans that ask for what the model does not have."""

from pathlib import Path
from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load
from deployments.gpu_plans import counted, planned_on_cpus
from hetero.cpu_plan import CpuPlan
from tests.unit.hetero.planned import written
from tests.unit.hetero.shapes import SMOLVLM_2B

# A model that fits any machine.
TEXT: dict[str, Any] = SMOLVLM_2B["text_config"] | {"num_hidden_layers": 1, "vocab_size": 1000}
SEES = {**SMOLVLM_2B, "text_config": TEXT}


READS = {"architectures": ["LlamaForCausalLM"], **TEXT}


def planned(folder: Path, config: dict[str, Any], **asked: Any) -> tuple[Settings, CpuPlan]:
    few = {"decoders": 1, "prefillers": 0, "lmcache.size_gb": 0.1, "engine.max_model_len": 128}
    return planned_on_cpus(load({"model": str(written(folder, config)), **few, **asked}))


@pytest.mark.parametrize(
    ("config", "given", "dtype", "said"),
    [
        ({}, {}, "float32", "float32: ONEDNN_MAX_CPU_ISA=AVX2 leaves out"),
        ({}, {"engine.dtype": "bfloat16"}, "bfloat16", "bfloat16 as set; ONEDNN_MAX_CPU_ISA=AVX2"),
        ({}, {"decoders.engine.dtype": "bfloat16"}, None, "bfloat16 as set"),
        ({"quantization_config": {"bits": 4}}, {}, "bfloat16", "the model is quantised; ONEDNN"),
        ({"num_hidden_layers": 0}, {}, "bfloat16", "bfloat16: model: its config.json has no num"),
    ],
)
def test_a_cpu_without_kernels_for_bfloat16_computes_in_float32(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    given: dict[str, Any],
    dtype: str | None,
    said: str,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    settings, plan = planned(tmp_path, READS | config, **given)
    assert settings.engine.get("dtype") == dtype
    assert said in plan.dtype


def test_weights_and_kv_are_counted_in_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(limit: str, **given: Any) -> int | None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        asked = {"model": "embedded", "decoders": 1, "prefillers": 0, **given}
        return planned_on_cpus(load(asked))[1].weights_bytes

    half = weights("AVX2", **{"engine.dtype": "bfloat16"})
    assert half is not None
    assert weights("AVX2") == 2 * half
    # 1 GiB of KV space holds half as many tokens, and so no longest sequence.
    longest = {"model": str(written(tmp_path, READS)), "engine.max_model_len": 100_000}
    assert weights("AVX2", **longest, **{"engine.dtype": "bfloat16"})
    with pytest.raises(SettingsError, match=r"KVCACHE_SPACE: 1\.0 GiB hold 65,536"):
        weights("AVX2", **longest)


def test_encoders_are_refused_for_a_model_that_reads_text_only(tmp_path: Path) -> None:
    assert planned(tmp_path, SEES, encoders=1)[0].encoders.replicas == 1
    with pytest.raises(SettingsError, match="reads text only, so there is nothing to encode; set"):
        planned(tmp_path, READS, encoders=1)


def test_several_models_are_planned_together_and_problems_name_theirs(tmp_path: Path) -> None:
    folders = {name: str(written(tmp_path / name, READS)) for name in ("a", "b")}
    few = {"decoders": 1, "prefillers": 0, "lmcache.size_gb": 0.1, "engine.max_model_len": 128}
    models: dict[str, dict[str, Any]] = {name: {"model": path} for name, path in folders.items()}
    settings, plan = planned_on_cpus(load({**few, "models": models}))
    assert [own.engine["dtype"] for own in settings.each.values()] == ["bfloat16"] * 2
    assert [term.split(" x ")[0] for term in plan.terms] == ["1 a decoders", "1 b decoders"]
    models["b"]["encoders"] = 1
    with pytest.raises(SettingsError, match=r"^models\.b\.encoders: b reads text only"):
        planned_on_cpus(load({**few, "models": models}))
    models = {"a": {"model": "embedded"}, "b": {"model": "embedded"}}
    models["b"]["engine"] = {"block_size": 512}
    with pytest.raises(SettingsError, match=r"^engine\.block_size: .*128 tokens for a, 512 tokens"):
        planned_on_cpus(load({"models": models}))


def test_gpus_of_several_models_are_counted_by_their_weights(tmp_path: Path) -> None:
    large = READS | {"num_hidden_layers": 60}
    models = {
        "small": {"model": str(written(tmp_path / "small", READS))},
        "large": {"model": str(written(tmp_path / "large", large))},
    }
    found = counted(load({"models": models}), 8).each
    assert found["small"].decoders.replicas == 1
    assert found["large"].decoders.replicas == 6
    with pytest.raises(SettingsError, match=r"^models\.small\.decoders\.num_gpus: 2: a worker has"):
        counted(
            load({"models": {**models, "small": {**models["small"], "decoders": {"num_gpus": 2}}}}),
            8,
        )
