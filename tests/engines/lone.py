"""A bare vLLM engine on the same model, which answers are compared with."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from conserve.engines import engine_environment, model_source
from conserve.launch import Launch, LaunchError
from conserve.settings import EMBEDDED_MODEL
from conserve_lab.peers.plan import server_command
from tests.engines.applications import START_S

LONE_PORT = 8190


def lone_engine(
    log: Path,
    model: str = EMBEDDED_MODEL,
    gpu: bool = False,
    adapters: Mapping[str, Path] | None = None,
) -> Launch:
    """vLLM's own server on the same model, without ConServe: what outputs are compared with."""
    arguments: dict[str, Any] = {"enforce_eager": True}
    if not gpu:
        arguments["dtype"] = "float32"
    if model == EMBEDDED_MODEL:
        arguments["max_model_len"] = 16384
    if adapters:
        arguments |= {"enable_lora": True, "max_loras": len(adapters)}
    command = server_command(model_source(model), "conserve-embedded", LONE_PORT, arguments)
    if adapters:
        command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    environment = engine_environment(model, gpu)
    launch = Launch([], log, environment, command)
    launch.__enter__()
    return launch


def wait_for_lone(lone: Launch, logs: Path) -> None:
    """Return when a lone engine answers."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{LONE_PORT}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if not lone.running or time.monotonic() > deadline_s:
            raise LaunchError(f"the lone engine did not start; see {logs}/lone.log")
        time.sleep(0.5)
