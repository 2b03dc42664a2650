"""Containers, on a stand-in for Docker's program, and on a real engine where this machine has one.

The stand-in runs commands here. The real engine's image is made of a static busybox (Debian:
podman, busybox-static).
"""

import io
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conserve.settings import EnvironmentSettings
from conserve_tools.answers import CommandDone
from conserve_tools.backends import Containers, find_engine
from conserve_tools.ledger import Environment
from conserve_tools.sandbox import SandboxError
from conserve_tools.spec import Limits, Run, Spec

IMAGE = "conserve-test:latest"
# Keeps a file for each container, which says where its home is, and a log of what it was asked.
STAND_IN = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/log"
case $1 in
    info) echo '{}' ;;
    run) for word; do
            case $last in --name) name=$word ;; --volume) home=${word%:/home} ;; esac
            last=$word
        done
        echo "$home" > "$here/$name.container" ;;
    exec) [ -e "$here/$3.container" ] || { echo "no such container" >&2; exit 125; }
        cd "$(cat "$here/$3.container")"; shift 3; exec "$@" ;;
    ps) cd "$here" && ls | sed -n 's/[.]container$//p' ;;
    rm) rm "$here/$4.container" 2>/dev/null || { echo "Error: No such container" >&2; exit 1; } ;;
    restart) ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "docker"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def real() -> str:
    engine = next((one for one in ("podman", "docker") if shutil.which(one)), None)
    if engine is None:
        pytest.skip("no container engine: neither podman nor docker is installed")
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no image can be made: there is no busybox (Debian: busybox-static)")
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(busybox, "bin/busybox")
        for name in ("sh", "sleep", "cat", "ls", "id", "dd", "echo", "test"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    trial = f"run --rm --init --network none --memory 64m {IMAGE} sh -c :".split()
    for words, given in ((["import", "-", IMAGE], layer.getvalue()), (trial, b"")):
        done = subprocess.run(
            [engine, *words], input=given, capture_output=True, timeout=60, check=False
        )
        if done.returncode:
            pytest.skip(f"{engine} cannot {words[0]} here: {done.stderr.decode()[-200:].strip()}")
    return engine


@pytest.fixture(params=["stand_in", "real"])
def containers(request: pytest.FixtureRequest, root: Path) -> Iterator[Containers]:
    found = Containers(request.getfixturevalue(request.param), root, EnvironmentSettings())
    yield found
    found.tidy(set())


def environment(number: int = 1, **spec: object) -> Environment:
    limits = Limits(wall_s=20, memory_bytes=64 * 2**20)
    asked = {"kind": "container", "image": IMAGE, "limits": limits, **spec}
    return Environment(number, 0, None, Spec.model_validate(asked))


def log(stand_in: str) -> list[str]:
    return (Path(stand_in).parent / "log").read_text().splitlines()


def test_commands_run_in_it_and_files_stay(containers: Containers, root: Path) -> None:
    one = environment(setup="echo set up > ready")
    containers.prepare(one)
    assert containers.start(one, Run(command="cat ready")).wait().stdout == "set up\n"
    outcome = containers.start(one, Run(command=["cat"], stdin="é")).wait()
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "é", "")
    assert outcome.isolation == "container"
    assert containers.start(one, Run(command="exit 7")).wait().exit_code == 7
    containers.remove(one)
    assert not (root / "1").exists()
    with pytest.raises(SandboxError, match=r"(?i)no such container|no container with name"):
        containers.start(one, Run(command="true")).wait()
    containers.remove(one)


def test_a_command_that_takes_too_long_or_is_cut_is_ended(containers: Containers) -> None:
    one = environment()
    containers.prepare(one)
    late = containers.start(one, Run(command=["sleep", "1000"], timeout_s=1)).wait()
    assert late.timed_out
    command = containers.start(one, Run(command=["sleep", "1000"]))
    threading.Timer(0.5, command.cut).start()
    assert command.wait().reason == "it was ended from outside"
    assert containers.start(one, Run(command="echo it goes on")).wait().stdout == "it goes on\n"


def test_what_is_held_goes_on_and_other_containers_are_removed(containers: Containers) -> None:
    kept, gone = environment(1), environment(2)
    for one in (kept, gone):
        containers.prepare(one)
    containers.start(kept, Run(command="echo mine > file")).wait()
    containers.tidy({1})
    assert containers.start(kept, Run(command="cat file")).wait().stdout == "mine\n"
    with pytest.raises(SandboxError):
        containers.start(gone, Run(command="true")).wait()


def test_a_real_container_holds_its_commands(real: str, root: Path) -> None:
    """It shares its home alone with this machine, gives no more memory, and ends what is left."""
    containers, one = Containers(real, root, EnvironmentSettings()), environment()
    containers.prepare(one)

    def run(command: str, timeout_s: float | None = None) -> CommandDone:
        return containers.start(one, Run(command=command, timeout_s=timeout_s)).wait()

    assert "work" not in run("ls /").stdout.split()
    assert run("id -u").stdout != "0\n"
    assert run("dd if=/dev/zero of=/dev/null bs=256M count=1").exit_code != 0
    assert run("sleep 1000 & sleep 1000", timeout_s=1).timed_out
    assert "1000" not in run("cat /proc/[0-9]*/cmdline").stdout
    containers.tidy(set())


def test_how_docker_is_asked(stand_in: str, root: Path) -> None:
    containers, one = Containers(stand_in, root, EnvironmentSettings()), environment(ports=1)
    assert containers.prepare(one) == (28_000,)
    (started,) = [line for line in log(stand_in) if line.startswith("run")]
    for option in (
        f"--name {containers.name(one)}", "--cap-drop ALL", "--network none", "no-new-privileges",
        f"--memory {2**26}", "--pids-limit 66", f"{root}/1/home:/home", "--env PORTS=28000",
    ):  # fmt: skip
        assert option in started
    assert started.endswith(f"{IMAGE} sleep infinity")
    containers.start(one, Run(command=["sleep", "60"], timeout_s=0.2)).wait()
    command = containers.start(one, Run(command=["sleep", "60"]))
    command.cut()
    command.wait()
    containers.tidy({1})
    restart = f"restart --time 0 {containers.name(one)}"
    assert [line for line in log(stand_in) if line.startswith("restart")] == [restart] * 3

    containers = Containers(stand_in, root, EnvironmentSettings(network=True))
    containers.prepare(one)
    assert "--network bridge -p 127.0.0.1:28000:28000" in log(stand_in)[-1]


def test_the_engine_of_this_machine_is_found(
    stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(stand_in).parent
    # Whatever this machine has of such programs, here there is one.
    for name in ("dirname", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    assert find_engine() == "docker"
