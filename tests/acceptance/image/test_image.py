"""The image for CPUs (`make image`) as containers run it, with its files read-only."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve import __version__
from conserve.embedded import write_checkpoint
from tests.acceptance.image.container import Container

_IMAGE = f"conserve:{__version__}-cpu"
_PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://10.9.9.9:9")
_SERVE = ("conserve", "serve", "prefillers=0", "decoders=1")
_FOLDER = "f\u00fcr alle, 1"
Start = Callable[..., Container]
_STREAM = """import httpx
asked = {"messages": [{"role": "user", "content": "Hello"}], "model": "m", "stream": True}
asked |= {"max_tokens": 400, "ignore_eos": True, "stream_options": {"include_usage": True}}
url = "http://127.0.0.1:8000/v1/chat/completions"
with httpx.stream("POST", url, json=asked, trust_env=False, timeout=None) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@pytest.fixture(scope="module")
def image() -> Iterator[Any]:
    """Podman's description of the image; ``root`` is the folder where its files are mounted."""
    asked = subprocess.run(["podman", "image", "inspect", _IMAGE], stdout=-1)
    assert not asked.returncode, f"there is no image {_IMAGE}: make image"
    mounted = subprocess.check_output(["podman", "image", "mount", _IMAGE], text=True)
    yield json.loads(asked.stdout)[0] | {"root": Path(mounted.strip())}
    subprocess.run(["podman", "image", "unmount", _IMAGE], check=True, stdout=-1)


@pytest.fixture
def start(image: Any, tmp_path: Path, machine_alone: None) -> Iterator[Start]:
    """Starts a command in a container; the image's own, if it is given none."""
    started, config = [], image["Config"]

    def start(*command: str, user: int = 1000, **variables: str) -> Container:
        variables = dict(one.split("=", 1) for one in config["Env"]) | variables
        usual = config["Entrypoint"] + config["Cmd"]
        started.append(Container(image["root"], user, tmp_path, command or usual, variables))
        return started[-1]

    yield start
    for container in started:
        container.process.kill()
        container.process.wait()


def test_what_is_in_it(start: Start, image: Any) -> None:
    called = ["conserve", "ray", "serve", "python", "bash", "sleep", "tail"]
    commit = image["Labels"]["org.opencontainers.image.revision"]
    look = f"""command -v {" ".join(called)}
        command -v ruff mypy git
        for one in /models /kv /tmp /opt/conserve /etc; do touch $one/new && echo $one; done
        conserve --version | grep -E 'commit|build'
        pip list --format=freeze
        dpkg-query -W -f '${{Package}}==${{Version}}\n'"""
    shell = start("bash", "-c", f"{{ {look}\n}} 2>/dev/null", user=12345)
    assert not shell.process.wait(), shell.said()
    lines = shell.said().splitlines()
    assert [Path(one).name for one in lines[:7]] == called
    assert lines[7:12] == ["/models", "/kv", "/tmp", f"commit {commit}", "build wheel"]
    sbom = image["root"] / "opt/conserve/share/sbom.cdx.json"
    listed = json.loads(sbom.read_text())["components"]
    assert {f"{one['name']}=={one['version']}" for one in listed} == {*lines[12:]}


def test_its_demo_runs_as_a_user_without_a_name_or_a_home(start: Start) -> None:
    demo = start(user=12345, HF_HUB_OFFLINE="1", **_PROXIES)
    assert demo.process.wait() == 0, demo.said()


def test_sigterm_ends_it_before_it_has_started(start: Start) -> None:
    serving = start(*_SERVE)
    status, bit, caught = Path(f"/proc/{serving.first.pid}/status"), 1 << (signal.SIGTERM - 1), 0
    while not caught & bit:
        caught = int(status.read_text().partition("SigCgt:")[2].split()[0], 16)
    serving.first.terminate()
    assert serving.process.wait() == 128 + signal.SIGTERM, serving.said()


def test_it_serves_from_volumes_and_finishes_turns_at_sigterm(
    start: Start, image: Any, tmp_path: Path
) -> None:
    home, models, kv = f"/models/{_FOLDER}", *(tmp_path / one / _FOLDER for one in ("models", "kv"))
    for folder in (models, kv):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    write_checkpoint(models)
    disk = {"path": f"/kv/{_FOLDER}", "size_gb": 1}
    settings = {"model": home, "served_model_name": "m", "lmcache": {"size_gb": 0.5, "disk": disk}}
    (models / "a.yaml").write_text(json.dumps(settings))
    serving = start(*_SERVE, "--config", f"{home}/a.yaml", HOME=home, **_PROXIES)
    check = image["Healthcheck"]["Test"][1:]
    assert serving.exec(*check).wait()
    while "Ready" not in serving.said():
        assert serving.process.poll() is None, serving.said()
        time.sleep(0.5)
    assert not serving.exec(*check).wait()
    streaming = serving.exec("python", "-c", _STREAM)
    assert streaming.stdout.readline().startswith("data: ")  # type: ignore[union-attr]
    serving.first.terminate()
    streamed, _ = streaming.communicate()
    assert '"completion_tokens":400' in streamed
    assert streamed.split()[-1] == "[DONE]"
    assert serving.process.wait() == 0, serving.said()
    assert any(one.is_file() for one in kv.rglob("*")), "its volume has no KV"
