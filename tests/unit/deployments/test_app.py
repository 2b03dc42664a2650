"""What engines are started with: who stores KV for others, LMCache's chunks, parts of GPUs."""

import dataclasses
import inspect
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray._private.services import determine_plasma_store_config
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform

from conserve.adapters import with_adapters
from conserve.settings import Settings, SettingsError, load
from deployments import app as building
from deployments.app import (
    _kv_role,
    _require_cuda_build,
    _with_parsers,
    llm_arguments,
    placement_options,
)
from deployments.joining import close_token, keep_token
from hetero.cards import Card
from hetero.gpu_layout import with_counts, with_memory
from hetero.host_memory import chunk_tokens
from hetero.model_shape import shape_of
from tests.unit.hetero.shapes import QWEN3_8B


@pytest.mark.parametrize(
    ("settings", "prefillers", "decoders"),
    [
        ({"placement": "conversation"}, "kv_producer", "kv_both"),
        ({"placement": "conversation", "pausing": False}, "kv_producer", "kv_consumer"),
        # There prefillers read what decoders have computed.
        ({"placement": "per_turn"}, "kv_producer", "kv_both"),
        # By default they host, and no other engine has a use for their own conversations' prompts.
        ({}, "kv_both", "kv_both"),
        ({"pausing": False}, "kv_both", "kv_consumer"),
    ],
)
def test_engines_store_where_something_is_parked_or_read(
    settings: dict[str, Any], prefillers: str, decoders: str
) -> None:
    chosen = Settings(**settings)
    roles = _kv_role("prefiller", chosen), _kv_role("decoder", chosen)
    assert roles == (prefillers, decoders)


@pytest.mark.parametrize("gpu", [False, True])
def test_an_encoder_has_no_kv_to_hand_over(gpu: bool) -> None:
    """Nor does it schedule conversations, or take adapters."""
    for given in ({"engine_scheduler": "conversation_lane"}, {"adapters_file": "a.json"}):
        settings = with_adapters(load({"encoders": 1, **given}))
        engine = llm_arguments("encoder", settings, settings.encoders, gpu)["engine_kwargs"]
        assert not {"kv_transfer_config", "scheduler_cls", "enable_lora"} & engine.keys()
        assert "worker_cls" not in engine
    decoder = llm_arguments("decoder", settings, settings.decoders, gpu)["engine_kwargs"]
    assert decoder["enable_lora"]


def _config(gpu: bool = True, **arguments: Any) -> Any:
    settings = load(arguments)
    return llm_arguments("decoder", settings, settings.decoders, gpu)


@pytest.mark.parametrize("gpu", [False, True])
def test_engines_of_any_model_are_told_their_parsers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gpu: bool
) -> None:
    """By names that vLLM has them; and the start says which."""
    config = {"architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "ray.serve"):
        settings = _with_parsers(load({"model": str(tmp_path)}))
    assert "tool calls: mistral (by its architecture, MistralForCausalLM)" in caplog.text
    for role, own in (("decoder", settings.decoders), ("prefiller", settings.prefillers)):
        told = llm_arguments(role, settings, own, gpu)["engine_kwargs"]
        assert told["enable_auto_tool_choice"] is True
        assert told["tool_call_parser"] == "mistral"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"]}))
    with caplog.at_level(logging.INFO, "ray.serve"):
        _with_parsers(load({"model": str(tmp_path)}))
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "(NewForCausalLM) is not known; set engine.tool_call_parser" in warning.message


@pytest.mark.parametrize("gpu", [False, True])
def test_replicas_are_placed_as_ray_serve_llm_would(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """Without asking it: that loads vLLM."""
    context = SimpleNamespace(runtime_env={"working_dir": "/work"})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    arguments = _config(gpu, decoders={"num_cpus": 2}, engine={"tensor_parallel_size": 2})
    ours = placement_options(arguments, gpu)
    theirs = LLMServer.get_deployment_options(LLMConfig(**arguments))
    # Without GPUs Serve need not be told that there are none, nor to set up workers' logs.
    for bundle in theirs["placement_group_bundles"]:
        bundle |= {name: 1.0 for name in ("GPU",) if bundle.get(name)}
        if not bundle.get("GPU"):
            bundle.pop("GPU", None)
    if not gpu:
        del theirs["ray_actor_options"]["runtime_env"]["worker_process_setup_hook"]
    assert ours == theirs


def test_an_engine_on_a_part_of_a_gpu_asks_for_no_more() -> None:
    """Its core has the replica's environment, by which alone vLLM learns of the part."""
    shared = _config(decoders={"num_gpus": 0.65})
    assert shared["runtime_env"]["env_vars"]["VLLM_RAY_PER_WORKER_GPUS"] == "0.65"
    assert shared["placement_group_config"]["bundles"] == [{"CPU": 0.5, "GPU": 0.65}]
    # It has a GPU of its own, and nothing to add to what vLLM asks for anyway.
    assert "VLLM_RAY_PER_WORKER_GPUS" not in _config()["runtime_env"]["env_vars"]
    on_cpu = _config(gpu=False, decoders={"num_gpus": 0.65})
    assert "VLLM_RAY_PER_WORKER_GPUS" not in on_cpu["runtime_env"]["env_vars"]


def test_a_kv_space_in_bytes_is_taken_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """There vLLM takes the variable over the argument."""
    name = "VLLM_CPU_KVCACHE_SPACE"

    def variables(**arguments: Any) -> Any:
        return _config(False, **arguments)["runtime_env"]["env_vars"]

    assert variables()[name] == "1"
    assert name not in variables(engine={"kv_cache_memory_bytes": 2 << 30})
    own = {"env": {name: "3"}, "engine": {"kv_cache_memory_bytes": 2 << 30}}
    assert variables(decoders=own)[name] == "3"
    source = inspect.getsource(CpuPlatform.check_and_update_config)
    assert source.index(name) < source.index("kv_cache_memory_bytes = kv_cache_space")


@pytest.mark.parametrize(
    ("shm_bytes", "expected"), [(64 << 20, 80 << 20), (0, 80 << 20), (1 << 30, None)]
)
def test_rays_store_fits_a_container(
    shm_bytes: int, expected: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default Ray takes 30 % of the memory, and refuses to start where that is over 10 GB."""
    options: dict[str, Any] = {}
    sessions = [tmp_path / f"session_2026-01-0{day}_1" for day in range(1, 8)]
    for session in sessions:
        session.mkdir()
        if session != sessions[1]:  # It is of another Ray.
            (session / "conserve.lock").touch()
    sessions.append(tmp_path / "session_2026-01-09_1")
    sessions[-1].mkdir()

    def start(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(address_info={"session_dir": str(sessions[-1])})

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(building.serve, "start", lambda **_: None)
    monkeypatch.setattr(building, "start_on_loopback", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=shm_bytes))
    building.start_ray(load({"device": "cpu"}))
    assert sorted(tmp_path.glob("session_*")) == [sessions[1], *sessions[3:]]
    assert (sessions[-1] / "conserve.lock").exists()
    assert options.get("object_store_memory") == expected
    assert options["address"] == "local"
    monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: 64 << 20)
    with pytest.raises(ValueError, match="exceeds /dev/shm size"):
        determine_plasma_store_config(40 * 10**9, str(tmp_path))
    assert determine_plasma_store_config(80 << 20, str(tmp_path))[2] == 80 << 20


def test_what_the_plan_tells_engines_reaches_vllm() -> None:
    card = Card("NVIDIA", 80 << 30)
    settings = with_counts(load({"device": "gpu", "placement": "conversation"}), 1)
    shape = shape_of(QWEN3_8B, 16_381_470_720)
    settings, plans = with_memory(settings, shape, {"prefillers": card, "decoders": card})
    arguments = llm_arguments("decoder", settings, settings.decoders, True)["engine_kwargs"]
    assert arguments["kv_cache_memory_bytes"] == plans[-1].kv_bytes
    # vLLM takes both by these names.
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert {"kv_cache_memory_bytes", "gpu_memory_utilization"} <= fields & set(arguments)


def test_a_torch_without_cuda_is_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SettingsError, match=r"device: .* build without CUDA: .*\.\[cuda\]"):
        _require_cuda_build()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _require_cuda_build()


@pytest.mark.parametrize(
    ("given", "gpu", "chunk"),
    [
        ({}, True, 256),
        ({}, False, 128),
        # Blocks that an operator asks for: a model with Mamba layers has large ones.
        ({"engine.block_size": 544}, True, 544),
        ({"engine.block_size": 96}, True, 288),
        ({"decoders.engine.block_size": 96, "prefillers.engine.block_size": 96}, True, 288),
        ({"placement": "collocated", "decoders.engine.block_size": 96}, True, 288),
    ],
)
def test_a_chunk_is_a_whole_number_of_every_engines_blocks(
    given: dict[str, Any], gpu: bool, chunk: int
) -> None:
    settings = load(given)
    assert chunk_tokens(settings, gpu) == chunk
    # Engines are told, to say what to set where their blocks turn out to be others.
    engine = llm_arguments("decoder", settings, settings.decoders, gpu)["engine_kwargs"]
    extra = engine["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["conserve.chunk_tokens"] == chunk


def test_engines_add_their_spans_where_turns_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(role: Any, **settings: Any) -> tuple[str | None, dict[str, str]]:
        chosen = load({"encoders": 1, **settings})
        given = llm_arguments(role, chosen, chosen.of_role(role), gpu=False)
        variables = given["runtime_env"]["env_vars"]
        endpoint = given["engine_kwargs"].get("otlp_traces_endpoint")
        return endpoint, {name: value for name, value in variables.items() if "OTEL" in name}

    assert told("decoder") == (None, {})
    here = {"tracing.endpoint": "http://c:4318/"}
    endpoint, variables = told("decoder", **here)
    assert endpoint == "http://c:4318/v1/traces"
    assert variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert variables["OTEL_SERVICE_NAME"] == "conserve-decoder"
    # vLLM fails on its first request if it keeps no statistics, and it traces no encodes.
    assert told("decoder", **here, **{"engine.disable_log_stats": True})[0] is None
    assert told("encoder", **here)[0] is None
    # What an operator has set stays.
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    assert "OTEL_SERVICE_NAME" not in told("prefiller", **here)[1]


def test_the_token_is_kept_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "a"}.items():
        with monkeypatch.context() as set_by_user:
            set_by_user.setenv(name, value)
            keep_token()
    close_token()
    assert not file.exists()
    umask = os.umask(0)
    keep_token()
    os.umask(umask)
    token = file.read_text()
    assert len(token) == 64
    modes = [file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777]
    assert (modes, caplog.text) == ([0o600, 0o700], "")
    # As Ray writes it, where `serve run` starts Ray before the application.
    file.chmod(0o644)
    close_token()
    assert (file.read_text(), file.stat().st_mode & 0o777) == (token, 0o600)
    assert f"{file} was open to other users" in caplog.text
    assert token not in caplog.text
