"""A Ray that the application starts answers only processes that have its token."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.joining import NO_TOKEN, answer

# As the application starts, or joins RAY_ADDRESS, without engines.
START = """
import ray
from conserve.settings import load
from deployments.app import start_ray
start_ray(load({"device": "cpu", "prefillers": 0}))
ray.get(ray.remote(type("Actor", (), {"answer": lambda self: 1})).remote().answer.remote())
print("Ray:", ray.get_runtime_context().gcs_address, ray._private.worker._global_node._session_dir)
input()
"""


@contextlib.contextmanager
def started(home: Path, log: Path, **environment: str) -> Iterator[list[str]]:
    """Yield the address of Ray and its session's folder; nothing if the process ended."""
    with log.open("w") as file, subprocess.Popen(
        [sys.executable, "-u", "-c", START], env=os.environ | {"HOME": str(home)} | environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield next((line.split()[1:] for line in process.stdout if line.startswith("Ray:")), [])
        process.communicate("\n", timeout=60)


@pytest.mark.usefixtures("machine_alone")
def test_only_processes_with_the_token_join(tmp_path: Path) -> None:
    home, log, joined = tmp_path / "home", tmp_path / "log", tmp_path / "joined"
    home.mkdir()
    with started(home, log) as (address, session):
        file = home / ".ray" / "auth_token"
        assert file.stat().st_mode & 0o777 == 0o600
        with started(home, joined, RAY_ADDRESS=address) as (same, _):
            assert same == address
        assert answer(address) == NO_TOKEN
        for token in ({}, {"RAY_AUTH_TOKEN": "a" * 64}):
            with started(tmp_path, joined, RAY_ADDRESS=address, **token) as said:
                assert said == []
            assert "it asks for a token, and this process has none" in joined.read_text()
        logs = [log, *(one for one in Path(session, "logs").rglob("*") if one.is_file())]
        assert len(logs) > 10
        assert not [one for one in logs if file.read_text() in one.read_text(errors="replace")]


@pytest.mark.usefixtures("machine_alone")
def test_a_ray_without_a_token_is_joined_by_a_user_who_has_one(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("a" * 64)
    with started(tmp_path, tmp_path / "log", RAY_AUTH_MODE="disabled") as (address, _):
        assert answer(address) == "OK"
        with started(tmp_path, tmp_path / "joined", RAY_ADDRESS=address) as (same, _):
            assert same == address
