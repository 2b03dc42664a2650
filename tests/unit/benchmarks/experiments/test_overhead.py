"""What ConServe costs: that all systems have the same engine, and how they are compared."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import overhead
from benchmarks.experiments.overhead import WarmTurns, paired_ratio
from conserve.engines import engine_arguments, engine_environment, flags
from conserve.launch import Launch
from conserve.settings import EMBEDDED_MODEL


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Command lines, and what they add to the environment, of what would be started."""
    seen = []

    class Recorded(Launch):
        def __init__(
            self, arguments: list[str], log: Path, environment: dict[str, str], command: list[str]
        ) -> None:
            seen.append((list(command), environment))

    monkeypatch.setattr(overhead, "Launch", Recorded)
    return seen


def test_the_engine_is_the_same_behind_every_system(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    overhead._bare_engine(tmp_path / "bare.log")
    overhead._ray_serve_llm(tmp_path / "ray.log")
    (bare, bare_environment), (ray, _) = started
    *_, builder, port, _, arguments = ray
    (config,) = json.loads(arguments)["llm_configs"]
    engine = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 16384}

    assert bare[-len(flags(engine)) :] == flags(engine)
    assert config["engine_kwargs"] == {**engine, "distributed_executor_backend": "mp"}
    ours = engine_arguments(EMBEDDED_MODEL, gpu=False)
    assert config["engine_kwargs"].items() <= ours.items()
    environment = engine_environment(EMBEDDED_MODEL, gpu=False)
    assert bare_environment == config["runtime_env"]["env_vars"] == environment

    assert bare[bare.index("--served-model-name") + 1] == overhead.MODEL
    assert config["model_loading_config"]["model_id"] == overhead.MODEL
    assert bare[bare.index("--port") + 1] == "8191"
    assert (builder, port) == ("build_openai_app", "8192")


def test_ray_serve_llm_has_its_usual_ingress_and_yields_to_nobody(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    overhead._ray_serve_llm(tmp_path / "ray.log")
    ((command, environment),) = started
    assert environment == {"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    assert "benchmarks.peers.ray_app" in command


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    bare = WarmTurns(round_median_s=[1.0, 2.0, 4.0])
    system = WarmTurns(round_median_s=[1.5, 2.2, 4.4])
    ratio, low, high = paired_ratio(system, bare)
    assert ratio == pytest.approx(1.1)
    assert (low, high) == pytest.approx((1.1, 1.5))
