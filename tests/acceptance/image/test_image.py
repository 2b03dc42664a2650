"""The image for CPUs (`make image`) as containers run it, with its files read-only."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve import __version__
from conserve.embedded import write_checkpoint
from tests.acceptance.image.container import Container

_IMAGE = os.environ.get("IMAGE", f"conserve:{__version__}-cpu")
_START_S = 900.0
_PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://10.9.9.9:9")
_SERVE = ("conserve", "serve", "prefillers=0", "decoders=1", "lmcache.size_gb=0.5")
_FOLDER = "f\u00fcr alle, 1"
_STREAM = """
import httpx
asked = {"messages": [{"role": "user", "content": "Hello"}], "model": "m", "stream": True}
asked |= {"max_tokens": 400, "ignore_eos": True, "stream_options": {"include_usage": True}}
url = "http://127.0.0.1:8000/v1/chat/completions"
with httpx.Client(trust_env=False, timeout=None) as client:
    with client.stream("POST", url, json=asked) as answer:
        lines = answer.iter_lines()
        print(next(lines), flush=True)
        print(*lines, sep="\\n")
"""


@pytest.fixture(scope="module")
def config() -> Any:
    """Return what the image says of its user, command and environment."""
    asked = subprocess.run(["podman", "image", "inspect", _IMAGE], stdout=-1)
    assert not asked.returncode, f"there is no image {_IMAGE}: make image"
    return json.loads(asked.stdout)[0]["Config"]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Mount the image's files."""
    mounted = subprocess.check_output(["podman", "image", "mount", _IMAGE], text=True)
    yield Path(mounted.strip())
    subprocess.run(["podman", "image", "unmount", _IMAGE], check=True, stdout=-1)


@pytest.fixture
def start(
    config: Any, root: Path, tmp_path: Path, machine_alone: None
) -> Iterator[Callable[..., Container]]:
    """Return a function that starts a command, the image's own if it is given none."""
    started: list[Container] = []

    def start(*command: str, user: int = 1000, **variables: str) -> Container:
        environment = dict(one.split("=", 1) for one in config["Env"]) | variables
        command = command or (*config["Entrypoint"], *config["Cmd"])
        container = Container(root, tmp_path, *command, user=user, environment=environment)
        started.append(container)
        return container

    yield start
    for container in started:
        container.kill()


def test_what_is_in_it(start: Callable[..., Container], config: Any, root: Path) -> None:
    assert config["User"] == "1000:1000"
    called = ["conserve", "ray", "serve", "python", "bash", "sleep", "tail"]
    commit = config["Labels"]["org.opencontainers.image.revision"]
    look = f"""command -v {" ".join(called)}
        command -v ruff mypy git
        for one in /models /kv /tmp /opt/conserve /etc; do touch $one/new && echo $one; done
        conserve --version | grep -E 'commit|build'
        pip list --format=freeze
        dpkg-query -W -f '${{Package}}==${{Version}}\n'"""
    shell = start("bash", "-c", f"{{ {look}\n}} 2>/dev/null", user=12345)
    assert not shell.wait(300), shell.said()
    lines = shell.said().splitlines()
    assert [Path(one).name for one in lines[:7]] == called
    assert lines[7:12] == ["/models", "/kv", "/tmp", f"commit {commit}", "build wheel"]
    listed = json.loads((root / "opt/conserve/share/sbom.cdx.json").read_text())["components"]
    assert {f"{one['name']}=={one['version']}" for one in listed} == {*lines[12:]}


def test_its_demo_runs_as_a_user_without_a_name_or_a_home(start: Callable[..., Container]) -> None:
    demo = start(user=12345, HF_HUB_OFFLINE="1", **_PROXIES)
    assert demo.wait(_START_S) == 0, demo.said()


def test_sigterm_ends_it_before_it_has_started(start: Callable[..., Container]) -> None:
    serving = start(*_SERVE)
    serving.wait_until_handled(signal.SIGTERM)
    serving.terminate()
    assert serving.wait(60) == 128 + signal.SIGTERM, serving.said()


def test_it_serves_from_volumes_and_finishes_turns_at_sigterm(
    start: Callable[..., Container], config: Any, tmp_path: Path
) -> None:
    models, kv = tmp_path / "models" / _FOLDER, tmp_path / "kv" / _FOLDER
    for folder in (models, kv):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    write_checkpoint(models)
    settings = {"model": f"/models/{_FOLDER}", "served_model_name": "m"}
    settings |= {"lmcache": {"disk": {"path": f"/kv/{_FOLDER}", "size_gb": 1}}}
    (models / "settings.yaml").write_text(json.dumps(settings))
    file = f"/models/{_FOLDER}/settings.yaml"
    serving = start(*_SERVE, "--config", file, HOME=f"/models/{_FOLDER}", **_PROXIES)
    serving.wait_until_said("Ready", _START_S)
    assert not serving.exec(*config["Healthcheck"]["Test"][1:]).wait(60)
    streaming = serving.exec("python", "-c", _STREAM)
    assert streaming.stdout is not None
    assert streaming.stdout.readline().startswith("data: ")
    serving.terminate()
    streamed, _ = streaming.communicate(timeout=300)
    assert '"completion_tokens":400' in streamed
    assert streamed.split()[-1] == "[DONE]"
    assert serving.wait(300) == 0, serving.said()
    assert any(one.is_file() for one in kv.rglob("*")), "its volume has no KV"
