"""An application that is started and ended as a service manager would; nothing stays of it."""

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from conserve.launch import Launch, health
from conserve.settings import Settings
from conserve_cli.doctor.listeners import check_listeners
from tests.engines.applications import START_S, URL
from tests.engines.client import engines
from tests.engines.processes import processes, runs

# For Ray's processes to notice that the one that started them is gone.
END_S = 60


def _files() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


# Blocks that are larger than prompts, and a cache in which vLLM finds nothing.
LARGE = ["engine.block_size=4096", "engine.max_model_len=2048"]
BROKEN = ["engine.worker_extension_cls=tests.engines.ending.forgetful.ForgetfulWorker"]


@pytest.mark.parametrize(
    ("number", "fault", "said"),
    [
        (signal.SIGTERM, LARGE, "nothing is found of prompts of up to 2,048 tokens"),
        pytest.param(signal.SIGINT, BROKEN, "a prompt that comes again", marks=pytest.mark.long),
    ],
)
def test_serve_run_ends_by_a_signal(
    machine_alone: None, tmp_path: Path, number: signal.Signals, fault: list[str], said: str
) -> None:
    """In any order in which Ray ends processes, none stays, and nothing in /dev/shm.

    Its engine's cache finds nothing, and the start has said so.
    """
    assert not health(URL)
    before = _files()
    # Without a prefiller, for a quick start.
    arguments = ["placement=collocated", "decoders=1", "lmcache.size_gb=0.5", *fault]
    with Launch(arguments, tmp_path / "serve.log") as application:
        application.wait_until_serving(URL, 0, 1, timeout_s=START_S)
        check = engines()[0]["cache_check"]
        assert check["again_tokens"] == 0
        assert said in check["problem"]
        assert check["problem"] in (tmp_path / "serve.log").read_text()
        body = {"model": "conserve-embedded", "prompt": "hello " * 1000, "max_tokens": 4}
        assert httpx.post(f"{URL}/v1/completions", json=body, timeout=120).status_code == 200
        # One node: nobody else is to reach any of it.
        assert [one.level for one in check_listeners(Settings())] == ["ok"]
        started = processes("")
        assert {"VLLM::EngineCore", "raylet"} <= {
            name for one in started for name in ("VLLM::EngineCore", "raylet")
            if name in " ".join(one.cmdline())
        }  # fmt: skip
        (serve,) = processes(r"ray\.serve\.scripts run")
        serve.send_signal(number)
        # Before `Launch` ends what is left, and removes what that has in /dev/shm.
        deadline_s = time.monotonic() + END_S
        while left := [one for one in psutil.wait_procs(started, timeout=1)[1] if runs(one)]:
            assert time.monotonic() < deadline_s, f"not ended by {number.name}: {left}"
        assert _files() == before
