"""What engines are started with, and vLLM's own server of one."""

import sys

import pytest

from conserve.engines import engine_arguments, flags, server_command


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


@pytest.mark.parametrize("gpu", [True, False])
def test_engines_say_what_they_found_in_caches(gpu: bool) -> None:
    assert engine_arguments("embedded", gpu)["enable_prompt_tokens_details"] is True
