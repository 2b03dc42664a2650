"""A bare vLLM engine on the same model, which answers are compared with."""

import sys
import time
from pathlib import Path

import httpx

from conserve.embedded import model_path
from conserve.launch import Launch, LaunchError
from tests.engines.applications import START_S

LONE_PORT = 8190


def lone_engine(log: Path) -> Launch:
    """vLLM's own server on the same model, without ConServe: what outputs are compared with."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model_path()), "--served-model-name", "conserve-embedded",
        "--host", "127.0.0.1", "--port", str(LONE_PORT), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "16384",
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
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
