"""Engines' arguments, and the command of vLLM's own server."""

import os
import subprocess
import sys
from pathlib import Path

from conserve.engines import engine_environment, flags
from conserve.settings import EMBEDDED_MODEL
from conserve_lab.peers.plan import server_command
from tests.checkout import ROOT


def test_a_bare_engine_listens_on_loopback_alone_and_has_its_arguments_last() -> None:
    command = server_command("/models/m", "m", 8191, {"dtype": "bfloat16", "max_model_len": 64})
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = dict(zip(command[3:11:2], command[4:11:2], strict=True))
    assert given == {
        "--model": "/models/m",
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": "8191",
    }
    assert command[11:] == [
        "--disable-uvicorn-access-log",
        *("--dtype", "bfloat16"),
        *("--max-model-len", "64"),
    ]


def test_engine_arguments_as_flags() -> None:
    arguments = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": 8,
        "config": {"a": [1]},
    }
    assert flags(arguments) == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--max-model-len", "8"),
        *("--config", '{"a": [1]}'),
    ]


def test_the_hub_is_asked_for_what_is_not_in_the_models_folder(tmp_path: Path) -> None:
    assert engine_environment(str(tmp_path), True, {"dtype"})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_environment(str(tmp_path), True, {"tokenizer"})


def test_an_engine_on_a_cpu_needs_no_compiler(tmp_path: Path) -> None:
    """VLLM compiles the ranking of tokens for log probabilities."""
    code = (
        "import torch\n"
        "from vllm.v1.sample.ops.logprobs import batched_count_greater_than as rank\n"
        "print(rank(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0]])).tolist())"
    )
    environment = {**os.environ, **engine_environment(EMBEDDED_MODEL, gpu=False)}
    # No program is there, and nothing that was compiled earlier.
    environment |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["[2]"], done.stderr
