"""The image for CPUs (`make image`), with its files read-only, as containers run it."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from conserve import __version__
from conserve.embedded import write_checkpoint
from tests.acceptance.image.container import Container

_IMAGE = os.environ.get("IMAGE", f"conserve:{__version__}-cpu")
_START_S = 600.0
# No address of a container's answers there.
_PROXIES = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"), "http://10.9.9.9"
)
_SMALL = ("prefillers=0", "decoders=1", "engine.dtype=float32")
_FOLDER = "f\u00fcr alle, 1"
# Prints once it has the first token, and then how the stream ended.
_STREAM = """
import http.client, json
connection = http.client.HTTPConnection("127.0.0.1", 8000)
body = {"model": "conserve", "messages": [{"role": "user", "content": "Hello"}], "stream": True,
        "max_tokens": 400, "ignore_eos": True, "stream_options": {"include_usage": True}}
connection.request("POST", "/v1/chat/completions", json.dumps(body),
                   {"Content-Type": "application/json"})
answer = connection.getresponse()
lines = [answer.readline()]
print(answer.status, flush=True)
lines += answer.read().decode().split("\\n\\n")
usage = [json.loads(one[6:])["usage"] for one in lines[1:] if '"usage":{' in one]
print(usage[-1]["completion_tokens"], lines[-2])
"""


@pytest.fixture(scope="module")
def config() -> Any:
    """Return what the image says of its user, command and environment."""
    for tool in ("podman", "unshare", "nsenter"):
        assert shutil.which(tool), f"{tool} is needed (Debian: podman, util-linux)"
    asked = subprocess.run(["podman", "image", "inspect", _IMAGE], stdout=-1)
    assert not asked.returncode, f"there is no image {_IMAGE}: make image"
    return json.loads(asked.stdout)[0]


@pytest.fixture(scope="module")
def root(config: Any) -> Iterator[Path]:
    """Mount the image's files."""
    mount = ["podman", "image", "mount", _IMAGE]
    yield Path(subprocess.check_output(mount, text=True).strip())
    subprocess.run(["podman", "image", "unmount", _IMAGE], check=True, stdout=-1)


@pytest.fixture
def start(config: Any, root: Path, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """Return a function that starts a command in the image, or the image's own."""
    started: list[Container] = []

    def start(*command: str, user: int = 1000, **variables: str) -> Container:
        own = dict(one.split("=", 1) for one in config["Config"]["Env"])
        usual = config["Config"]["Entrypoint"] + config["Config"]["Cmd"]
        started.append(Container(root, own | variables, tmp_path, command or usual, user))
        return started[-1]

    yield start
    for container in started:
        container.kill()


def test_what_manifests_call_is_on_the_path_and_tools_of_tests_are_not(
    start: Callable[..., Container], config: Any
) -> None:
    assert config["Config"]["User"] == "1000:1000"
    called = "conserve ray serve python bash sleep tail"
    found = start("bash", "-c", f"command -v {called}; command -v ruff mypy git; true").output(60)
    assert [Path(one).name for one in found.split()] == called.split()


def test_its_folders_for_volumes_alone_can_be_written(start: Callable[..., Container]) -> None:
    tried = "for one in /models /kv /tmp /opt/conserve /etc; do touch $one/new && echo $one; done"
    written = start("bash", "-c", f"{tried} 2>/dev/null; df -m /dev/shm", user=12345).output(60)
    *folders, _, shared_memory = written.splitlines()
    assert folders == ["/models", "/kv", "/tmp"]
    assert shared_memory.split()[1] == "64"


def test_its_list_of_contents_is_what_is_installed(start: Callable[..., Container]) -> None:
    listed = json.loads(start("cat", "/opt/conserve/share/sbom.cdx.json").output(60))
    urls = {one["purl"].partition("?")[0] for one in listed["components"]}
    installed = start("bash", "-c", "pip list --format=json; dpkg-query -W").output(300)
    python, *debian = installed.splitlines()
    for one in json.loads(python):
        name = canonicalize_name(one["name"])
        assert f"pkg:pypi/{name}@{one['version']}".replace("+", "%2B") in urls
    for line in debian:
        name, version = line.split()
        assert f"pkg:deb/debian/{name.partition(':')[0]}@{version}".replace("+", "%2B") in urls
    assert f"pkg:pypi/conserve@{__version__}" in urls
    assert len(urls) == len(json.loads(python)) + len(debian)


def test_it_says_the_commit_that_it_was_built_from(
    start: Callable[..., Container], config: Any
) -> None:
    said = start("conserve", "--version").output(300).splitlines()
    commit = config["Config"]["Labels"]["org.opencontainers.image.revision"]
    assert said[:3] == [f"conserve {__version__}", f"commit {commit}", "build wheel"]


def test_its_demo_runs_as_a_user_without_a_name_or_a_home(start: Callable[..., Container]) -> None:
    demo = start(user=12345, HF_HUB_OFFLINE="1", **_PROXIES)
    assert "no KV moved twice" in demo.output(_START_S)


def test_sigterm_ends_it_before_it_has_started(start: Callable[..., Container]) -> None:
    serving = start("conserve", "serve", *_SMALL)
    while not serving.handles(signal.SIGTERM):
        time.sleep(0.01)
    serving.terminate()
    assert serving.wait(60) == 128 + signal.SIGTERM, serving.said()


def test_it_serves_from_volumes_and_finishes_turns_at_sigterm(
    start: Callable[..., Container], config: Any, tmp_path: Path
) -> None:
    models, kv = tmp_path / "models" / _FOLDER, tmp_path / "kv" / _FOLDER
    for folder in (models, kv):
        folder.mkdir(parents=True)
    kv.chmod(0o777)
    write_checkpoint(models)
    disk = {"path": f"/kv/{_FOLDER}", "size_gb": 1}
    settings = {"model": f"/models/{_FOLDER}", "served_model_name": "conserve"}
    settings |= {"lmcache": {"size_gb": 0.5, "disk": disk}}
    (models / "settings.yaml").write_text(json.dumps(settings))
    file = f"/models/{_FOLDER}/settings.yaml"
    command = ["conserve", "serve", "--config", file, *_SMALL]
    serving = start(*command, HOME=f"/models/{_FOLDER}", TMPDIR="/tmp", **_PROXIES)
    deadline_s = time.monotonic() + _START_S
    while "Ready" not in serving.said():
        assert serving.runs(), serving.said()
        assert time.monotonic() < deadline_s, serving.said()
        time.sleep(1)
    check = config["Config"]["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    assert not serving.exec(*check[1:]).wait(60)
    streaming = serving.exec("python", "-c", _STREAM)
    assert streaming.stdout is not None
    assert streaming.stdout.readline() == "200\n"
    serving.terminate()
    said, _ = streaming.communicate(timeout=300)
    assert said == "400 data: [DONE]\n", serving.said()
    assert serving.wait(120) == 0, serving.said()
    assert any(kv.rglob("*.*")), "no KV is in its volume"
