"""Commands in a sandbox: what they get, what stops them, and that nothing of them stays."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
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


@pytest.fixture
def place(root: Path) -> Iterator[Place]:
    place = Place(root, 1, 0, (28_000, 28_001))
    place.make()
    yield place
    place.remove()
    assert not place.folder.exists()


def run(
    place: Place, namespaces: bool, command: Any, limits: Limits | None = None, **more: Any
) -> CommandDone:
    return begin(place, namespaces, command, limits, **more).wait()


def begin(
    place: Place, namespaces: bool, command: Any, limits: Limits | None = None, **more: Any
) -> Command:
    sandbox = Sandbox(namespaces=namespaces, network=False)
    return sandbox.start(place, Run(command=command, **more), limits or Limits(wall_s=30))


@pytest.mark.parametrize("namespaces", BOTH)
def test_a_command_has_its_folder_and_nothing_of_ours(
    place: Place, namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    first = run(place, namespaces, "cat > note; echo $PORTS; env; echo oh >&2", stdin="é\n")
    assert first.exit_code == 0
    assert first.stderr == "oh\n"
    assert first.stdout.startswith("28000 28001\n")
    assert "secret" not in first.stdout
    names = {line.partition("=")[0] for line in first.stdout.splitlines()[1:]}
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", MARKER, "PORT", "PORTS", "PWD", "SHLVL", "_"}
    assert run(place, namespaces, ["cat", "note"]).stdout == "é\n"
    assert run(place, namespaces, "echo x > $TMPDIR/y && cat $TMPDIR/y ~/note").exit_code == 0
    if os.geteuid() == 0:
        assert run(place, namespaces, "id -u").stdout != "0\n"


@pytest.mark.parametrize("namespaces", BOTH)
def test_how_it_ended(place: Place, namespaces: bool) -> None:
    assert run(place, namespaces, "exit 7").exit_code == 7
    assert run(place, namespaces, "kill -TERM $$").exit_code == 128 + signal.SIGTERM
    missing = run(place, namespaces, ["no-such-program"])
    assert missing.exit_code == 127
    assert "no-such-program: No such file" in missing.stderr


@pytest.mark.parametrize("namespaces", BOTH)
@pytest.mark.parametrize(
    ("command", "limits", "said"),
    [
        ("sleep 60", {"wall_s": 0.5}, "longer"),
        ("while :; do :; done", {"cpu_s": 1, "wall_s": 20}, "CPU"),
        ("while :; do echo > f$((i=i+1)); done", {"disk_bytes": 2**16, "wall_s": 20}, "disk_bytes"),
        ("head -c 200000 /dev/zero > big; sleep 60", {"disk_bytes": 2**16}, "disk_bytes"),
    ],
)
def test_what_stops_it(
    place: Place, namespaces: bool, command: str, limits: dict[str, Any], said: str
) -> None:
    outcome = run(place, namespaces, command, Limits(**{"wall_s": 30, **limits}))
    assert outcome.reason is not None
    assert said in outcome.reason
    assert outcome.exit_code > 128
    assert outcome.timed_out == (said == "longer")


@pytest.mark.parametrize("namespaces", BOTH)
def test_what_a_process_may_not_have(place: Place, namespaces: bool) -> None:
    limits = Limits(memory_bytes=2**28, file_bytes=1000, open_files=16, wall_s=30)
    python = "/usr/bin/env python3 -c "
    greedy = run(place, namespaces, python + "'x = bytearray(2**29)'", limits)
    assert "MemoryError" in greedy.stderr
    run(place, namespaces, "head -c 5000 /dev/zero > long", limits)
    assert (place.folder / "home" / "long").stat().st_size == 1000
    many = run(place, namespaces, python + "'[open(\"/dev/null\") for _ in range(99)]'", limits)
    assert "Too many open files" in many.stderr
    several = python + "'x = bytearray(2**27); import time; time.sleep(60)' & "
    together = run(place, namespaces, several * 3 + "wait", limits)
    assert together.reason is not None
    assert "memory" in together.reason


@pytest.mark.parametrize("namespaces", BOTH)
def test_a_fork_bomb_is_bounded(place: Place, namespaces: bool) -> None:
    before = len(psutil.pids())
    most = 0
    command = begin(
        place, namespaces, "b() { b | b & }; b; sleep 60", Limits(processes=20, wall_s=2)
    )
    ended = threading.Event()
    outcomes: list[CommandDone] = []

    def wait() -> None:
        outcomes.append(command.wait())
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not ended.wait(0.02):
        most = max(most, len(psutil.pids()))
    assert outcomes
    # Other tests' processes, and what ends while it is counted.
    assert most - before < 100


@pytest.mark.parametrize("namespaces", BOTH)
@pytest.mark.parametrize(
    "escape",
    [
        "setsid sleep 611 & sleep 0.2",
        "(setsid sh -c 'setsid sleep 611 & setsid sleep 611 &' &); sleep 0.2",
        "nohup sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' >/dev/null 2>&1 & sleep 0.2",
        f"env -u {MARKER} setsid sleep 611 >/dev/null 2>&1 </dev/null & sleep 0.2",
    ],
)
def test_nobody_stays_behind(place: Place, namespaces: bool, escape: str) -> None:
    """Also not who has left session and parents, and forgotten the marker."""
    before = set(psutil.pids())
    assert run(place, namespaces, escape).exit_code == 0
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


@pytest.mark.parametrize("namespaces", BOTH)
def test_much_output_does_not_stop_it(place: Place, namespaces: bool) -> None:
    limits = Limits(output_bytes=1000, wall_s=60)
    outcome = run(place, namespaces, "head -c 3000000 /dev/zero; echo end > done; cat done", limits)
    assert outcome.exit_code == 0
    assert outcome.truncated
    assert len(outcome.stdout) == 1000
    assert not run(place, namespaces, "echo short", limits).truncated


@pytest.mark.parametrize("namespaces", BOTH)
def test_long_input_is_read_or_left(place: Place, namespaces: bool) -> None:
    long = "x" * 2**20
    assert run(place, namespaces, "wc -c", stdin=long).stdout.strip() == str(2**20)
    assert run(place, namespaces, "true", stdin=long).exit_code == 0


@pytest.mark.parametrize("namespaces", BOTH)
def test_it_can_be_ended_from_outside(place: Place, namespaces: bool) -> None:
    command = begin(place, namespaces, "setsid sleep 600 & sleep 600")
    threading.Timer(0.5, command.cut).start()
    outcome = command.wait()
    assert outcome.reason == "it was ended from outside"
    assert not outcome.timed_out


@pytest.mark.parametrize("namespaces", BOTH)
def test_the_process_above_it_is_killed(place: Place, namespaces: bool) -> None:
    """The command and its children go with it."""
    command = begin(place, namespaces, "setsid sleep 600 & echo there; sleep 600")
    while len(marked(str(place.root))) < 3:
        time.sleep(0.05)
    command._process.kill()
    with pytest.raises(SandboxError, match="lost"):
        command.wait()
    assert marked(str(place.root)) == []


@pytest.mark.parametrize("namespaces", BOTH)
def test_whoever_asked_is_killed(place: Place, namespaces: bool) -> None:
    """As when the manager is: a fork of this process asks, and is gone."""
    child = os.fork()
    if child == 0:
        try:
            begin(place, namespaces, "setsid sleep 600 & sleep 600")
            time.sleep(1)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    deadline_s = time.monotonic() + 20
    while marked(str(place.root)):
        assert time.monotonic() < deadline_s, "the command has outlived whoever asked for it"
        time.sleep(0.05)


def test_namespaces_hide_the_machine(place: Place) -> None:
    if _MISSING is not None:
        pytest.skip(_MISSING)
    other = Place(place.root, 2, 1)
    other.make()
    (other.folder / "home" / "secret").write_text("x")
    look = run(place, True, f"ls {other.folder}/home; ls /run; ls -d /proc/[0-9]* | wc -l")
    # The namespace's first, the shell, ls and wc.
    assert int(look.stdout) <= 5
    for write in ("/etc/x", "/usr/x", "/var/tmp/x", str(place.root / "x")):
        assert run(place, True, f"touch {write}").exit_code != 0
    assert run(place, True, "touch /home/x /tmp/x /dev/shm/x").exit_code == 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = ("127.0.0.1", listener.getsockname()[1])
        refused = run(
            place, True, ["python3", "-c", f"import socket; socket.create_connection({there})"]
        )
        assert "refused" in refused.stderr
        reached = run(
            place, False, ["python3", "-c", f"import socket; socket.create_connection({there})"]
        )
        assert reached.exit_code == 0
    other.remove()


def test_folders_without_permissions_are_removed(place: Place) -> None:
    run(place, False, "mkdir -p a/b && touch a/b/c && chmod 0 a/b a && ln -s /etc etc")
    place.remove()
    assert not place.folder.exists()
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
