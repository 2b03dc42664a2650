"""Limits and watches a command, and outlives everything that it started.

`sandbox` runs this as ``python -I -S launcher.py RESULT_FD``, with the standard library alone, so
that it starts quickly. It reads its order as a line of JSON from standard input, and writes the
outcome as a line of JSON to the file descriptor. When standard input closes, everything ends.

With namespaces, the command's processes are a PID namespace: when its first process, ours, ends,
the kernel ends them all. They have an empty network, see the files that they need, and write only
their own. Without, orphans fall to this process (a *subreaper*), so it finds, stops and kills
descendants that have left their session and their parents.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 2, 4, 8, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
# The same number on every architecture, as for all newer system calls.
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_LOOK_S = 0.1
_DISK_LOOK_S = 1.0
# An empty file takes disk space too.
_LEAST_FILE_BYTES = 512

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    result_fd = int(sys.argv[1])
    os.set_inheritable(result_fd, False)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    order = json.loads(_line(0))
    began_s = time.monotonic()
    said: dict[str, Any] = {"exit_code": None, "why": None, "error": None}
    try:
        said |= _carry_out(order, began_s + order["timeout_s"])
    except OSError as error:
        said["error"] = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    said["wall_s"] = time.monotonic() - began_s
    with contextlib.suppress(BrokenPipeError):
        os.write(result_fd, json.dumps(said).encode() + b"\n")


def _line(file: int) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(file, 1 << 16)
        if not part:
            raise SystemExit(0)  # The manager has died.
        parts.append(part)
    return b"".join(parts)


def _carry_out(order: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    stdin = file_of(order["stdin"])
    if order["namespaces"]:
        _enter_namespaces(order["network"])
    # Pipes for why the command could not start, and for its status in a namespace.
    problem, tell_problem = os.pipe()
    outcome, tell_outcome = os.pipe()
    child = os.fork()
    if child == 0:
        _be_child(order, stdin, tell_problem, tell_outcome)
    for file in (stdin, tell_problem, tell_outcome):
        os.close(file)
    why = _watch(order, child, deadline_s)
    if why is not None:
        _end(child, order["namespaces"])
    _, status = os.waitpid(child, 0)
    _end(None, order["namespaces"])
    if said := os.read(problem, 4096):
        return {"error": said.decode(errors="replace")}
    if order["namespaces"]:
        told = os.read(outcome, 4)
        status = struct.unpack("i", told)[0] if told else int(signal.SIGKILL)
    if why is None and _disk_bytes(order) > order["limits"]["disk_bytes"]:
        why = "disk"
    if why is None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        why = "cpu"
    return {"exit_code": _exit_code(status), "why": why}


def file_of(text: str) -> int:
    """Return a file to read as standard input; it needs no thread that writes to a pipe."""
    stdin = os.memfd_create("stdin")
    with open(os.dup(stdin), "wb") as writer:
        writer.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    return stdin


def _exit_code(status: int) -> int:
    """Return the exit code as shells do: 128 and the signal's number for a killed process."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# --- watching -------------------------------------------------------------------------------------


def _watch(order: dict[str, Any], child: int, deadline_s: float) -> str | None:
    """Return None when the child has ended, or why it must end."""
    ended = os.pidfd_open(child)
    next_disk_s = time.monotonic() + _DISK_LOOK_S
    limits = order["limits"]
    try:
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return "timeout"
            wait_s = min(_LOOK_S, deadline_s - now_s)
            readable, _, _ = select.select([0, ended], [], [], wait_s)
            if ended in readable:
                return None
            # Nothing follows the order, so this is the end of input.
            if 0 in readable and not os.read(0, 4096):
                return "cut"
            below = _descendants()
            if len(below) > limits["processes"] + 2:
                return "processes"
            if sum(map(_resident_bytes, below)) > limits["memory_bytes"]:
                return "memory"
            if time.monotonic() >= next_disk_s:
                looked_s = time.monotonic()
                if _disk_bytes(order) > limits["disk_bytes"]:
                    return "disk"
                next_disk_s = looked_s + max(_DISK_LOOK_S, 10 * (time.monotonic() - looked_s))
    finally:
        os.close(ended)


def _end(child: int | None, namespaces: bool) -> None:
    """End everything below this process; the caller waits for ``child``."""
    if namespaces:
        # A PID namespace ends with its first process.
        if child is not None:
            os.kill(child, signal.SIGKILL)
        return
    while below := _descendants():
        # Stop all of them first, so that none can start others.
        stopped: set[int] = set()
        while new := [pid for pid in below if pid not in stopped]:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= set(new)
            below = _descendants()
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        if child is not None:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0):
                pass


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants() -> list[int]:
    found, rest = [], [os.getpid()]
    while rest:
        pid = rest.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(one) for one in file.read().split()]
            except OSError:
                continue
            found += children
            rest += children
    return found


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _disk_bytes(order: dict[str, Any]) -> int:
    total, rest = 0, [order["home"], order["tmp"]]
    while rest:
        try:
            with os.scandir(rest.pop()) as entries:
                for entry in entries:
                    try:
                        size = entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            rest.append(entry.path)
                    except FileNotFoundError:
                        continue
                    total += max(size, _LEAST_FILE_BYTES)
        except OSError:
            continue
    return total


# --- the command's side ---------------------------------------------------------------------------


def _be_child(order: dict[str, Any], stdin: int, problem: int, outcome: int) -> NoReturn:
    """Become the command, or its namespaces' first process; never return."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if order["namespaces"]:
            _furnish(order)
            command = os.fork()
            if command:
                _be_first(command, outcome)
        _become(order, stdin)
    except BaseException as error:
        said = getattr(error, "strerror", None) or repr(error)
        named = getattr(error, "filename", None)
        os.write(problem, (f"{said}: {named}" if named else said).encode(errors="replace"))
    finally:
        os._exit(127)


def _be_first(command: int, outcome: int) -> NoReturn:
    """Reap orphans until the command has ended; the namespace then ends with this process."""
    # Only the command's processes may keep the outputs open.
    os.closerange(0, 3)
    while True:
        pid, status = os.wait()
        if pid == command:
            os.write(outcome, struct.pack("i", status))
            os._exit(0)


def _become(order: dict[str, Any], stdin: int) -> NoReturn:
    os.setsid()
    limits = order["limits"]
    for which, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + order["others"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(which)
        hard = value + 1 if which == resource.RLIMIT_CPU else value
        if most != resource.RLIM_INFINITY:
            value, hard = min(value, most), min(hard, most)
        resource.setrlimit(which, (value, hard))
    os.chdir("/home" if order["namespaces"] else order["home"])
    os.umask(0o077)
    if order["uid"] is not None:
        os.setgroups([])
        os.setgid(order["uid"])
        os.setuid(order["uid"])
        # Changing the user id clears the setting.
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(stdin, 0)
    program = order["arguments"][0]
    try:
        os.execvpe(program, order["arguments"], order["environment"])
    except OSError as error:
        # Shells report it like this.
        os.write(2, f"{program}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


# --- namespaces -----------------------------------------------------------------------------------


def _enter_namespaces(network: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = _CLONE_NEWPID | _CLONE_NEWIPC | (0 if network else _CLONE_NEWNET)
    _checked(_libc.unshare(flags | (_CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _furnish(order: dict[str, Any]) -> None:
    """Mount the files that the command sees: its own as /home and /tmp, the rest read-only."""
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    own = [(os.open(order[name], os.O_PATH), f"/{name}") for name in ("home", "tmp")]
    for file, where in own:
        _mount(f"/proc/self/fd/{file}", where, None, _MS_BIND)
        os.close(file)
    # Hide other environments, and the sockets of system services.
    for hidden in (order["root"], "/run"):
        if os.path.isdir(hidden):
            _mount("tmpfs", hidden, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4k,mode=755")
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    shared = f"size={order['limits']['memory_bytes']},mode=1777"
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, shared)
    _set_attributes("/", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, _AT_RECURSIVE)
    for where in ("/home", "/tmp", "/dev/shm"):
        _set_attributes(where, 0, _MOUNT_ATTR_RDONLY)


def _mount(source: str | None, where: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if one is None else one.encode() for one in (source, where, kind, data or None)]
    done = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _checked(done, f"mount {where}")


def _set_attributes(where: str, add: int, clear: int, flags: int = 0) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", add, clear, 0, 0), 32)
    done = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), _AT_FDCWD, where.encode(), flags, attributes,
        ctypes.c_size_t(32),
    )  # fmt: skip
    _checked(done, f"mount_setattr {where}")


def _checked(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {errno.errorcode.get(number)} ({os.strerror(number)})")


if __name__ == "__main__":
    main()
