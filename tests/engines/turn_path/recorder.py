"""Records which files run in a process, in all its threads, while a file is there."""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

# Names the folder, in the environment. The text of the file there names the recording.
VARIABLE, SIGN = "CONSERVE_TURN_PATH", "sign"
ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("autoscale", "conserve", "conserve_inside", "deployments", "hetero")
_TABLE = str(ROOT / "deployments/table/table.py")
_CALL = 0  # `PyTrace_CALL`: a function begins, or a coroutine goes on.


def watch_here() -> None:
    """Record in this process and those that it forks."""
    os.register_at_fork(after_in_child=_start)
    _start()


def _start() -> None:
    sign = Path(os.environ[VARIABLE], SIGN)
    threading.Thread(target=_watch, args=[sign], daemon=True).start()


def _watch(sign: Path) -> None:
    while True:
        time.sleep(0.05)
        if sign.exists() and any(package in sys.modules for package in _PACKAGES):
            _record(sign, sign.with_name(f"{sign.read_text()}-{os.getpid()}"))


def _record(sign: Path, mine: Path) -> None:
    files: set[str] = set()
    calls: list[tuple[float, str]] = []

    def called(_: Any, frame: FrameType, what: int, __: Any) -> int:
        code, caller = frame.f_code, frame.f_back
        if what == _CALL:
            files.add(code.co_filename)
        # The operand of `RESUME` is 0 where a function begins.
        if what == _CALL and code.co_filename == _TABLE and not code.co_code[frame.f_lasti + 1]:
            own = caller is not None and caller.f_code.co_filename == _TABLE
            if not own and not code.co_name.startswith(("_", "<")):
                calls.append((time.time(), code.co_name))
        return 0

    types = ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
    function = ctypes.PYFUNCTYPE(*types)(called)
    _profile_all(function)
    mine.with_suffix(".began").touch()
    while sign.exists():
        time.sleep(0.05)
    _profile_all(None)
    ours = tuple(f"{ROOT / package}/" for package in _PACKAGES)
    names = [os.path.relpath(one, ROOT) for one in files if one.startswith(ours)]
    title = Path("/proc/self/cmdline").read_text()
    mine.write_text(json.dumps({"title": title, "files": names, "calls": calls}))
    mine.rename(mine.with_suffix(".json"))


def _profile_all(function: Any) -> None:
    """Have a C function called in all threads there are, as Python itself can from 3.12 on."""
    api, usual_s = ctypes.pythonapi, sys.getswitchinterval()
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_ThreadHead.restype = api.PyThreadState_Next.restype = ctypes.c_void_p
    sys.setswitchinterval(1e3)  # No thread may end between two steps of the loop.
    thread = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while thread is not None:
        api._PyEval_SetProfile(ctypes.c_void_p(thread), function, ctypes.py_object(None))
        thread = api.PyThreadState_Next(ctypes.c_void_p(thread))
    sys.setswitchinterval(usual_s)
