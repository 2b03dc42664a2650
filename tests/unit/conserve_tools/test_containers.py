"""Command lines for containers, with a stand-in for Docker's program that runs commands here."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conserve.settings import EnvironmentSettings
from conserve_tools.backends import Containers, find_engine
from conserve_tools.ledger import Environment
from conserve_tools.sandbox import SandboxError
from conserve_tools.spec import Limits, Run, Spec

# Keeps containers as files with their names, and what it was asked in a log.
STAND_IN = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/log"
case $1 in
    info) echo '{}' ;;
    run) while [ "$1" != --name ]; do shift; done; touch "$here/$2.container" ;;
    exec) [ -e "$here/$3.container" ] || { echo "no such container" >&2; exit 125; }
        shift 3; exec "$@" ;;
    ps) cd "$here" && ls | sed -n 's/[.]container$//p' ;;
    rm) rm "$here/$4.container" 2>/dev/null || { echo "Error: No such container" >&2; exit 1; } ;;
    restart) ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path) -> str:
    path = tmp_path / "docker"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="conserve-test-", dir="/var/tmp") as folder:
        yield Path(folder)


def environment(number: int = 1, **spec: object) -> Environment:
    asked = {"kind": "container", "image": "python:3.11", "limits": Limits(wall_s=20), **spec}
    return Environment(number, 0, None, Spec.model_validate(asked))


def log(engine: str) -> list[str]:
    return (Path(engine).parent / "log").read_text().splitlines()


def test_a_container_from_beginning_to_end(engine: str, root: Path) -> None:
    containers = Containers(engine, root, EnvironmentSettings())
    one = environment(ports=1, setup="echo set up")
    one.ports = containers.prepare(one)
    assert one.ports == (28_000,)
    (started,) = [line for line in log(engine) if line.startswith("run")]
    for option in (
        f"--name {containers.name(one)}", "--cap-drop ALL", "--network none", "no-new-privileges",
        f"--memory {2**30}", "--pids-limit 66", f"{root}/1/home:/home", "--env PORTS=28000",
    ):  # fmt: skip
        assert option in started
    assert started.endswith("python:3.11 sleep infinity")
    outcome = containers.start(one, Run(command=["cat"], stdin="é")).wait()
    assert (outcome.exit_code, outcome.stdout) == (0, "é")
    assert containers.start(one, Run(command="exit 7")).wait().exit_code == 7
    containers.remove(one)
    assert not (root / "1").exists()
    with pytest.raises(SandboxError, match="no such container"):
        containers.start(one, Run(command="true")).wait()
    containers.remove(one)


def test_the_network_is_given_with_its_ports(engine: str, root: Path) -> None:
    containers = Containers(engine, root, EnvironmentSettings(network=True))
    containers.prepare(environment(ports=1))
    started = next(line for line in log(engine) if line.startswith("run"))
    assert "--network bridge -p 127.0.0.1:28000:28000" in started


def test_whatever_is_ended_has_its_container_restarted(engine: str, root: Path) -> None:
    containers = Containers(engine, root, EnvironmentSettings())
    one = environment()
    containers.prepare(one)
    late = containers.start(one, Run(command=["sleep", "60"], timeout_s=0.2)).wait()
    assert late.timed_out
    command = containers.start(one, Run(command=["sleep", "60"]))
    command.cut()
    assert command.wait().reason == "it was ended from outside"
    restarts = [line for line in log(engine) if line.startswith("restart")]
    assert restarts == [f"restart --time 0 {containers.name(one)}"] * 2


def test_a_predecessors_are_kept_or_removed(engine: str, root: Path) -> None:
    containers = Containers(engine, root, EnvironmentSettings())
    for number in (1, 2):
        containers.prepare(environment(number))
    containers.tidy({2})
    left = sorted(path.name for path in Path(engine).parent.glob("*.container"))
    assert left == [f"{containers.name(environment(2))}.container"]


def test_what_is_missing_is_said(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(engine).parent
    # Whatever this machine has of such programs, here there is one.
    for name in ("dirname", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    assert find_engine() == "docker"
    Path(engine).write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SandboxError, match=r"docker does not answer.*podman is not installed"):
        find_engine()
