"""Adapts a process's environment to what Ray, vLLM and LMCache need."""

import contextlib
import locale
import os
import pwd
import re
import sys
import tempfile
from pathlib import Path

# The path of a socket has 107 bytes at most. Ray's takes 68 of them beyond this folder:
# `/ray/session_2026-01-31_12-00-00_000000_1234567/sockets/plasma_store`, in ASCII.
_TEMPORARY = re.compile(r"[\w./@+-]{1,39}", re.ASCII)

# Sentences for the user who starts an application.
notes: list[str] = []


def adapt() -> None:
    """Change this process's environment so that an application starts in it.

    The process begins anew if its encoding is not UTF-8, so call this first.
    """
    os.environ["PYTHONUTF8"] = os.environ["PYTHONSAFEPATH"] = "1"
    if not sys.flags.utf8_mode and locale.getencoding().lower() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "localhost"
    if direct != "*":
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{direct},localhost,127.0.0.1,::1"
    # Without any folder for temporary files, what needs one says so.
    with contextlib.suppress(OSError):
        _adapt_temporary()
        _adapt_account()


def _adapt_temporary() -> None:
    given, folder = os.environ.get("TMPDIR"), tempfile.gettempdir()
    if not _TEMPORARY.fullmatch(folder) and os.access("/tmp", os.W_OK | os.X_OK):
        folder = "/tmp"
    if given and os.path.abspath(given) != folder:
        why = "it has to be writable, of at most 39 ASCII characters and without spaces"
        notes.append(f"Temporary files are in {folder}, not in TMPDIR ({given}): {why}")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    if "RAY_TMPDIR" not in os.environ and not _is_open(ray := os.path.join(folder, "ray")):
        os.environ["RAY_TMPDIR"] = str(own_folder())
        notes.append(f"Ray's files are in {os.environ['RAY_TMPDIR']}, as {ray} cannot be written")


def _adapt_account() -> None:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", str(os.getuid()))
    home = os.path.expanduser("~")
    used = [os.path.join(home, name) for name in ("", ".ray", ".cache", ".config")]
    if not os.path.isabs(home) or not os.path.isdir(home) or not all(map(_is_open, used)):
        if os.path.isdir(models := f"{home}/.cache/huggingface"):
            os.environ.setdefault("HF_HOME", models)
        notes.append(f"The home folder is {own_folder()}, as {home} cannot be written")
        home = str(own_folder())
    os.environ["HOME"] = home


def _is_open(folder: str) -> bool:
    return not os.path.exists(folder) or os.access(folder, os.W_OK | os.X_OK)


def forget_proxies() -> None:
    """Have this process, which calls this machine alone from now on, use no proxies."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]


def own_folder() -> Path:
    """Return a folder for temporary files that this user alone can enter."""
    folder = Path(tempfile.gettempdir(), f"conserve-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's: set TMPDIR")
    folder.chmod(0o700)
    return folder
