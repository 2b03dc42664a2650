"""What ConServe costs: that all systems have the same engine."""

import json
from pathlib import Path

import pytest

from conserve.engines import engine_arguments, engine_environment, flags
from conserve.launch import Launch
from conserve.settings import EMBEDDED_MODEL
from experiments import overhead, warm


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

    assert bare[bare.index("--served-model-name") + 1] == warm.MODEL
    assert config["model_loading_config"]["model_id"] == warm.MODEL
    assert bare[bare.index("--port") + 1] == "8191"
    assert (builder, port) == ("build_openai_app", "8192")


def test_ray_serve_llm_has_its_usual_ingress_and_yields_to_nobody(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    overhead._ray_serve_llm(tmp_path / "ray.log")
    ((command, environment),) = started
    assert environment == {"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    assert "benchmarks.peers.ray_app" in command
