"""What ConServe costs: that all systems have the same engine."""

import json
from pathlib import Path

import pytest

from conserve.engines import engine_arguments, engine_environment, flags
from conserve.launch import Launch
from conserve.settings import EMBEDDED_MODEL
from experiments import overhead
from experiments.agents import MODEL
from experiments.harness import Experiment


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
    started: list[tuple[list[str], dict[str, str]]],
) -> None:
    overhead.bare_engine(Experiment("overhead", None))
    overhead.ray_serve_llm(Experiment("overhead", None))
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

    assert bare[bare.index("--served-model-name") + 1] == MODEL
    assert config["model_loading_config"]["model_id"] == MODEL
    assert bare[bare.index("--port") + 1] == "8191"
    assert (builder, port) == ("build_openai_app", "8192")


def test_ray_serve_llm_has_its_usual_ingress_and_yields_to_nobody(
    started: list[tuple[list[str], dict[str, str]]],
) -> None:
    overhead.ray_serve_llm(Experiment("overhead", None))
    ((command, environment),) = started
    assert environment == {"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    assert "benchmarks.peers.ray_app" in command
