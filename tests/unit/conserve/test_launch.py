"""Waiting for an application: its condition, and how long each phase takes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conserve import launch
from conserve.launch import Launch, LaunchError, bound, shared_memory_of

_STATES: list[dict[str, Any]] = [
    {},
    {},
    {"prefillers": 0, "decoders": 0},
    {"prefillers": 0, "decoders": 0, "starting": {"starting engines": 2}},
    {"prefillers": 0, "decoders": 0, "starting": {"starting engines": 2, "warming up": 1}},
    {"prefillers": 1, "decoders": 0, "starting": {"warming up": 2}},
    {"prefillers": 1, "decoders": 2},
]


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """An application that is ready after seven looks, a second each."""
    states, seconds = iter(_STATES), iter(range(1000))
    monkeypatch.setattr(launch, "health", lambda url: next(states))
    monkeypatch.setattr(launch.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(launch.time, "sleep", lambda s: None)
    monkeypatch.setattr(Launch, "running", property(lambda self: True))
    return Launch([], Path("unused"))


def test_a_start_says_what_it_waits_for_and_how_long_it_did(application: Launch) -> None:
    said: list[str] = []
    phases = application.wait_until_serving("http://unused", 1, 2, on_progress=said.append)
    assert said == [
        "starting Ray and Serve",
        "starting Ray and Serve",
        "loading vLLM (0 of 3 engines ready)",
        "loading vLLM (0 of 3 engines ready)",
        "starting engines (0 of 3 engines ready)",
        "warming up (1 of 3 engines ready)",
    ]
    assert list(phases) == [
        "starting Ray and Serve", "loading vLLM", "starting engines", "warming up",
    ]  # fmt: skip
    assert all(took_s > 0 for took_s in phases.values())


def test_a_patch_that_does_not_fit_is_all_that_is_said() -> None:
    log = "RayTaskError(x)\nraise PatchError(\na.b.PatchError: patch one is for vllm\nRuntimeError"
    assert launch._errors(log) == ["patch one is for vllm"]


def test_a_start_waits_for_encoders_that_are_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = iter(
        [{"prefillers": 1, "decoders": 1}, {"prefillers": 1, "decoders": 1, "encoders": 1}]
    )
    monkeypatch.setattr(launch, "health", lambda url: next(states))
    monkeypatch.setattr(launch.time, "sleep", lambda s: None)
    monkeypatch.setattr(Launch, "running", property(lambda self: True))
    said: list[str] = []
    Launch([], tmp_path / "log").wait_until_serving(
        "http://unused", 1, 1, on_progress=said.append, encoders=1
    )
    assert said == ["loading vLLM (2 of 3 engines ready)"]


def test_an_application_that_failed_names_the_cause_first(tmp_path: Path) -> None:
    """A replica fails three times with the same cause, and logs much each time."""
    cause = "InductorError: InvalidCxxCompiler: No working C++ compiler found"
    text, log = tmp_path / "text", tmp_path / "log"
    decoder = "\x1b[36m(ServeReplica:default:decoder pid=%d)\x1b[0m "
    attempt = [
        decoder + f"(EngineCore pid=%d) {cause}",
        *(decoder + f"pid %d: error of step {'x' * n}" for n in range(20)),
        "(ServeController pid=1%d) RuntimeError: the engine failed its first turn (%d)",
    ]
    lines = [line % (number, number) for number in range(3) for line in attempt]
    text.write_text("\n".join([*lines, "RuntimeError: Deploying application default failed"]))
    with Launch([], log, command=["cat", str(text)]) as application:
        application.wait()
        with pytest.raises(LaunchError) as failed:
            application.wait_until_serving("http://127.0.0.1:9", 1, 1)
    said = str(failed.value).splitlines()
    assert said[1] == cause
    assert said[-2] == "RuntimeError: Deploying application default failed"
    assert len(said) == 13
    assert said[-1] == f"The whole log: {log}"


def test_an_applications_log_is_bounded_while_it_writes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")
    with log.open("ab", buffering=0) as writing:
        writing.write(b"old\n" * 100)
        bound(log, 500)
        assert not log.with_name("log.1").exists()
        writing.write(b"old\n" * 100)
        bound(log, 500)
        writing.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert log.with_name("log.1").read_bytes() == b"old\n" * 200


# A process that has left its parent and its session, and has shared memory.
_STRAY = """
import os, time
from multiprocessing.shared_memory import SharedMemory
if os.fork():
    os._exit(0)
os.setsid()
memory = SharedMemory(create=True, size=1000)
print(f"{os.getpid()} {memory.name}", flush=True)
time.sleep(600)
"""
_COMMAND = f"""
import subprocess, sys, time
from conserve.launch import end_with_launcher
end_with_launcher(0.0)
subprocess.run([sys.executable, "-c", {_STRAY!r}])
time.sleep(600)
"""
_LAUNCHER = f"""
import sys
from pathlib import Path
from conserve.launch import Launch
with Launch([], Path(sys.argv[1]), command=[sys.executable, "-c", {_COMMAND!r}]) as application:
    application.wait()
"""


def test_all_that_was_launched_is_killed_with_its_launcher(tmp_path: Path) -> None:
    log = tmp_path / "log"
    launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(log)])
    while not (told := log.read_text().split() if log.exists() else []):
        assert launcher.poll() is None
    started = [psutil.Process(int(told[0])), *psutil.Process(launcher.pid).children()]
    memory = Path("/dev/shm", told[1])
    assert (len(started), memory.exists()) == (2, True)
    launcher.kill()
    launcher.wait()
    _, left = psutil.wait_procs(started, timeout=10)
    for one in left:
        one.kill()
    assert (left, memory.exists()) == ([], False)


_SHARES = """
import time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=100_000)
lock = get_context("spawn").Lock()
print(memory.name, flush=True)
time.sleep(600)
"""


def test_the_shared_memory_and_semaphores_of_a_process_are_known() -> None:
    with subprocess.Popen([sys.executable, "-c", _SHARES], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        name = process.stdout.readline().decode().strip()
        files = shared_memory_of([process.pid])
        process.kill()
    assert Path("/dev/shm", name) in files
    assert {file.name.partition("_")[0].partition("-")[0] for file in files} == {"psm", "sem.mp"}
    for file in files:
        file.unlink(missing_ok=True)
    assert shared_memory_of([2**22 + 1]) == set()
