"""Runs a process that holds power caps for another, and puts the limits back when that one ends.

Ray kills an actor, and a node's processes, without asking. The holder is therefore outside Ray's
reach and watches a pipe: when it closes, for whatever reason, it puts the limits back.

Each request is a line of JSON with all wanted caps and the GPUs that replicas use; each answer is a
`CapsOutcome`.
"""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hetero.nvml import Nvml, NvmlError
from hetero.power import Cap, CapRefused, PowerCaps, recover


class GuardLost(RuntimeError):
    """The holder has ended; its changes are on record, for the next one to undo."""


@dataclass(frozen=True, slots=True)
class CapsOutcome:
    """Limits that hold, and for other GPUs why not, as a sentence and a word (``HasOwner``)."""

    applied_w: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Guard:
    """Starts a holder and tells it the wanted caps. Calls block briefly.

    The limits are put back when this is closed, or its process ends.
    """

    def __init__(self, owner: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetero.guard", owner, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The child must find this package where its parent did.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        # The child forks the holder, then exits.
        self._process.wait()
        self.pid = int(self._answer()["pid"])

    def want(self, caps: Mapping[str, Cap], used: Collection[str]) -> CapsOutcome:
        """Hold these caps and no others, on GPUs that replicas use; raises `GuardLost`."""
        assert self._process.stdin is not None
        wanted = {uuid: asdict(cap) for uuid, cap in caps.items()}
        try:
            self._process.stdin.write(json.dumps({"caps": wanted, "used": sorted(used)}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise GuardLost(f"the holder of power caps is gone: {error}") from error
        return CapsOutcome(**self._answer())

    def close(self) -> None:
        """Have every limit put back, and return when that is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise GuardLost("the holder of power caps has ended; see the log for why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def hold(caps: PowerCaps, requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        request = json.loads(line)
        wanted = {uuid: Cap(**cap) for uuid, cap in request["caps"].items()}
        used, outcome = set(request["used"]), CapsOutcome()
        for uuid in caps.held:
            if uuid not in wanted or uuid not in used:
                caps.restore(uuid).log()
        for uuid, cap in wanted.items():
            try:
                outcome.applied_w[uuid] = caps.apply(uuid, cap, used)
            except (CapRefused, NvmlError, OSError) as error:
                outcome.refused[uuid] = str(error)
                outcome.reasons[uuid] = type(error).__name__
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


def _end(number: int, frame: Any) -> None:
    # Ignore further signals, so that putting the limits back is not interrupted.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(0)


def main() -> None:
    """Leave the parent's process group, undo leftover caps, and hold caps until the input ends."""
    owner, directory = sys.argv[1], Path(sys.argv[2])
    if os.fork():
        # Ray kills an actor's children with it, but not its grandchildren.
        os._exit(0)
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    with Nvml() as nvml:
        for done in recover(nvml, directory):
            done.log()
        with PowerCaps(nvml, owner, directory) as caps:
            print(json.dumps({"pid": os.getpid()}), flush=True)  # noqa: T201
            hold(caps, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
