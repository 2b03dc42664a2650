"""Commands in a sandbox: what they get, what stops them, and that nothing of them stays."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from conserve_tools.answers import CommandDone
from conserve_tools.sandbox import (
    MARKER,
    Command,
    Place,
    Sandbox,
    SandboxError,
    kill_marked,
    marked,
    namespaces_missing,
)
from conserve_tools.spec import Limits, Run

with tempfile.TemporaryDirectory(prefix="conserve-test-", dir="/var/tmp") as _folder:
    _MISSING = namespaces_missing(Path(_folder))
BOTH = [
    pytest.param(True, marks=pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))),
    False,
]


@pytest.fixture
def root() -> Iterator[Path]:
    """Not under /tmp: its folders are for one user, and commands have another one there."""
    folder = Path(tempfile.mkdtemp(prefix="conserve-test-", dir="/var/tmp"))
    folder.chmod(0o711)
    yield folder
    assert marked(str(folder)) == []
    folder.rmdir()


@dataclass(frozen=True)
class Box:
    """An environment's place, and a sandbox for its commands."""

    place: Place
    namespaces: bool

    @property
    def home(self) -> Path:
        return self.place.folder / "home"

    @property
    def marked(self) -> list[psutil.Process]:
        return marked(str(self.place.root))

    def begin(self, command: Any, limits: Limits | None = None, **more: Any) -> Command:
        sandbox = Sandbox(namespaces=self.namespaces, network=False)
        return sandbox.start(self.place, Run(command=command, **more), limits or Limits(wall_s=30))

    def run(self, command: Any, limits: Limits | None = None, **more: Any) -> CommandDone:
        return self.begin(command, limits, **more).wait()


@pytest.fixture(params=BOTH)
def box(root: Path, request: pytest.FixtureRequest) -> Iterator[Box]:
    """A sandbox with namespaces, and one without."""
    place = Place(root, 1, 0, (28_000, 28_001))
    place.make()
    yield Box(place, request.param)
    place.remove()
    assert not place.folder.exists()


def test_a_command_has_its_folder_and_nothing_of_ours(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    first = box.run("cat > note; echo $PORTS; env; echo oh >&2", stdin="é\n")
    assert (first.exit_code, first.stderr) == (0, "oh\n")
    assert first.isolation == ("namespaces" if box.namespaces else "limits")
    assert first.stdout.startswith("28000 28001\n")
    assert "secret" not in first.stdout
    names = {line.partition("=")[0] for line in first.stdout.splitlines()[1:]}
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", MARKER, "PORT", "PORTS", "PWD", "SHLVL", "_"}
    assert box.run(["cat", "note"]).stdout == "é\n"
    assert box.run("echo x > $TMPDIR/y && cat $TMPDIR/y ~/note").exit_code == 0
    if os.geteuid() == 0:
        assert box.run("id -u").stdout != "0\n"


def test_how_it_ended(box: Box) -> None:
    assert box.run("exit 7").exit_code == 7
    assert box.run("kill -TERM $$").exit_code == 128 + signal.SIGTERM
    missing = box.run(["no-such-program"])
    assert missing.exit_code == 127
    assert "no-such-program: No such file" in missing.stderr


@pytest.mark.parametrize(
    ("command", "limits", "said"),
    [
        ("sleep 60", {"wall_s": 0.5}, "longer"),
        ("while :; do :; done", {"cpu_s": 1, "wall_s": 20}, "CPU"),
        ("while :; do echo > f$((i=i+1)); done", {"disk_bytes": 2**16, "wall_s": 20}, "disk_bytes"),
        ("head -c 200000 /dev/zero > big; sleep 60", {"disk_bytes": 2**16}, "disk_bytes"),
    ],
)
def test_what_stops_it(box: Box, command: str, limits: dict[str, Any], said: str) -> None:
    outcome = box.run(command, Limits(**{"wall_s": 30, **limits}))
    assert outcome.reason is not None
    assert said in outcome.reason
    assert outcome.exit_code > 128
    assert outcome.timed_out == (said == "longer")


def test_what_a_process_may_not_have(box: Box) -> None:
    limits = Limits(memory_bytes=2**28, file_bytes=1000, open_files=16, wall_s=30)
    python = "/usr/bin/env python3 -c "
    greedy = box.run(python + "'x = bytearray(2**29)'", limits)
    assert "MemoryError" in greedy.stderr
    box.run("head -c 5000 /dev/zero > long", limits)
    assert (box.home / "long").stat().st_size == 1000
    many = box.run(python + "'[open(\"/dev/null\") for _ in range(99)]'", limits)
    assert "Too many open files" in many.stderr
    several = python + "'x = bytearray(2**27); import time; time.sleep(60)' & "
    together = box.run(several * 3 + "wait", limits)
    assert together.reason is not None
    assert "memory" in together.reason


def test_a_fork_bomb_is_bounded(box: Box) -> None:
    most = before = len(psutil.pids())
    command = box.begin("b() { b | b & }; b; sleep 60", Limits(processes=20, wall_s=2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(command.wait)
        while not waiting.done():
            most = max(most, len(psutil.pids()))
            time.sleep(0.02)
    assert waiting.result().exit_code
    # Other tests' processes, and what ends while it is counted.
    assert most - before < 100


@pytest.mark.parametrize(
    "escape",
    [
        "setsid sleep 611 & sleep 0.2",
        "(setsid sh -c 'setsid sleep 611 & setsid sleep 611 &' &); sleep 0.2",
        "nohup sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' >/dev/null 2>&1 & sleep 0.2",
        f"env -u {MARKER} setsid sleep 611 >/dev/null 2>&1 </dev/null & sleep 0.2",
    ],
)
def test_nobody_stays_behind(box: Box, escape: str) -> None:
    """Also not who has left session and parents, and forgotten the marker."""
    before = set(psutil.pids())
    assert box.run(escape).exit_code == 0
    left = [one for one in sleepers() if one not in before]
    assert left == []


def sleepers() -> list[int]:
    """Processes whose command line is one of those above."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "sleep 611" in line or 'trap "" TERM HUP' in line:
            found.append(process.info["pid"])
    return found


def test_much_output_does_not_stop_it(box: Box) -> None:
    limits = Limits(output_bytes=1000, wall_s=60)
    outcome = box.run("head -c 3000000 /dev/zero; echo end > done; cat done", limits)
    assert outcome.exit_code == 0
    assert outcome.truncated
    assert len(outcome.stdout) == 1000
    assert not box.run("echo short", limits).truncated


def test_long_input_is_read_or_left(box: Box) -> None:
    long = "x" * 2**20
    assert box.run("wc -c", stdin=long).stdout.strip() == str(2**20)
    assert box.run("true", stdin=long).exit_code == 0


def test_the_process_above_it_is_killed(box: Box) -> None:
    """The command and its children go with it."""
    command = box.begin("setsid sleep 600 & echo there; sleep 600")
    while len(box.marked) < 3:
        time.sleep(0.05)
    command._process.kill()
    with pytest.raises(SandboxError, match="lost"):
        command.wait()
    assert box.marked == []


def test_namespaces_hide_the_machine(box: Box) -> None:
    dial = "import socket; socket.create_connection({})"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reach = ["python3", "-c", dial.format(("127.0.0.1", listener.getsockname()[1]))]
        reached = box.run(reach)
    if not box.namespaces:
        assert reached.exit_code == 0
        return
    assert "refused" in reached.stderr
    other = Place(box.place.root, 2, 1)
    other.make()
    (other.folder / "home" / "secret").write_text("x")
    look = box.run(f"ls {other.folder}/home; ls /run; ls -d /proc/[0-9]* | wc -l")
    other.remove()
    # The namespace's first, the shell, ls and wc.
    assert int(look.stdout) <= 5
    for write in ("/etc/x", "/usr/x", "/var/tmp/x", str(box.place.root / "x")):
        assert box.run(f"touch {write}").exit_code != 0
    assert box.run("touch /home/x /tmp/x /dev/shm/x").exit_code == 0


def test_folders_without_permissions_are_removed(box: Box) -> None:
    box.run("mkdir -p a/b && touch a/b/c && chmod 0 a/b a && ln -s /etc etc")
    box.place.remove()
    assert not box.place.folder.exists()
    assert Path("/etc/passwd").exists()


def test_marked_processes_are_ended(root: Path) -> None:
    marker = f"{root}:7"
    child = subprocess.Popen(["sleep", "600"], env={MARKER: marker}, start_new_session=True)
    while not marked(marker):
        time.sleep(0.02)
    assert kill_marked(f"{root}:") == 0
    assert kill_marked(marker) == 1
    child.wait()
    assert kill_marked(str(root), exactly=False) == 0
