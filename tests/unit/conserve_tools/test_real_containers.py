"""Containers on a real engine, where this machine has one that can run a container.

The image is made here, of a static busybox (Debian: podman, busybox-static).
"""

import io
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conserve.settings import EnvironmentSettings
from conserve_tools.backends import Containers
from conserve_tools.ledger import Environment
from conserve_tools.sandbox import SandboxError
from conserve_tools.spec import Limits, Run, Spec

IMAGE = "conserve-test:latest"


@pytest.fixture(scope="module")
def engine() -> str:
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
    trial = [
        "run",
        "--rm",
        "--init",
        "--network",
        "none",
        "--memory",
        "64m",
        IMAGE,
        "sh",
        "-c",
        ":",
    ]
    for words, given in ((["import", "-", IMAGE], layer.getvalue()), (trial, b"")):
        done = subprocess.run(
            [engine, *words], input=given, capture_output=True, timeout=60, check=False
        )
        if done.returncode:
            pytest.skip(f"{engine} cannot {words[0]} here: {done.stderr.decode()[-200:].strip()}")
    return engine


@pytest.fixture
def containers(engine: str) -> Iterator[Containers]:
    with tempfile.TemporaryDirectory(prefix="conserve-test-", dir="/var/tmp") as folder:
        found = Containers(engine, Path(folder), EnvironmentSettings())
        yield found
        found.tidy(set())


def environment(number: int = 1, **spec: object) -> Environment:
    limits = Limits(wall_s=20, memory_bytes=64 * 2**20)
    asked = {"kind": "container", "image": IMAGE, "limits": limits, **spec}
    return Environment(number, 0, None, Spec.model_validate(asked))


def test_commands_run_in_it_and_files_stay(containers: Containers) -> None:
    one = environment(setup="echo set up > ready")
    containers.prepare(one)
    assert containers.start(one, Run(command="cat ready")).wait().stdout == "set up\n"
    outcome = containers.start(one, Run(command=["cat"], stdin="é")).wait()
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "é", "")
    assert containers.start(one, Run(command="exit 7")).wait().exit_code == 7
    # Its home alone is shared with this machine.
    assert "work" not in containers.start(one, Run(command="ls /")).wait().stdout.split()
    assert containers.start(one, Run(command="id -u")).wait().stdout != "0\n"
    containers.remove(one)
    with pytest.raises(SandboxError, match=r"(?i)no such container|no container with name"):
        containers.start(one, Run(command="true")).wait()
    containers.remove(one)


def test_a_command_that_takes_too_long_ends_with_all_that_it_left(containers: Containers) -> None:
    one = environment()
    containers.prepare(one)
    late = containers.start(one, Run(command="sleep 1000 & sleep 1000", timeout_s=1)).wait()
    assert late.timed_out
    command = containers.start(one, Run(command="sleep 1000"))
    threading.Timer(0.5, command.cut).start()
    assert command.wait().reason == "it was ended from outside"
    processes = containers.start(one, Run(command="cat /proc/[0-9]*/cmdline")).wait().stdout
    assert "1000" not in processes
    assert containers.start(one, Run(command="echo it goes on")).wait().stdout == "it goes on\n"


def test_more_memory_than_it_may_have_is_not_given(containers: Containers) -> None:
    one = environment()
    containers.prepare(one)
    hungry = containers.start(one, Run(command="dd if=/dev/zero of=/dev/null bs=256M count=1"))
    assert hungry.wait().exit_code != 0


def test_what_nobody_holds_is_removed_and_what_is_held_goes_on(containers: Containers) -> None:
    kept, gone = environment(1), environment(2)
    for one in (kept, gone):
        containers.prepare(one)
    containers.start(kept, Run(command="echo mine > file")).wait()
    containers.tidy({1})
    assert containers.start(kept, Run(command="cat file")).wait().stdout == "mine\n"
    with pytest.raises(SandboxError):
        containers.start(gone, Run(command="true")).wait()
