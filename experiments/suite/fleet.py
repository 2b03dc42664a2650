"""The systems that are up: started on ports of their own, watched, and stopped."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.client import Endpoint
from benchmarks.peers.apart import Apart, start_apart
from benchmarks.peers.plan import free_port
from experiments.suite.memory import Room
from experiments.suite.systems import Variant


class Fleet:
    """Starts and stops systems, and sees what they take.

    Args:
        out: folder for how each was started.
        tell: called with what is waited for.
    """

    def __init__(self, out: Path, tell: Callable[[str], None]) -> None:
        self._out = out
        self._tell = tell
        self._up: dict[str, tuple[Apart, ExitStack]] = {}
        self._most_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(list(self._up))

    @property
    def up(self) -> list[str]:
        """Names of the systems that are up."""
        return list(self._up)

    def endpoint(self, name: str) -> Endpoint:
        """A system that is up, as the driver talks to it."""
        peer = self._up[name][0].peer
        found = Endpoint(name, peer.url, peer.model, min_tokens=peer.min_tokens)
        if peer.session_header is None:
            return found
        return replace(found, conversation_headers=(peer.session_header,))

    def start(self, variant: Variant) -> None:
        """Have a system up and warm.

        Raises:
            PeerUnavailable: it cannot run here.
        """
        self._tell(f"{variant.name}: starting")
        with ExitStack() as stack:
            # Only now: what has started since may have taken a port that was free before.
            options = replace(variant.options, port=free_port())
            apart = stack.enter_context(start_apart(variant.peer, options, self._told(variant)))
            started = json.dumps(apart.peer.described, indent=2) + "\n"
            (self._out / f"{variant.name}.started.json").write_text(started)
            self._up[variant.name] = (apart, stack.pop_all())
        self.look()

    def _told(self, variant: Variant) -> Callable[[str], None]:
        return lambda text: self._tell(f"{variant.name}: {text}")

    def stop(self, names: Sequence[str]) -> None:
        """Stop systems, all at the same time."""
        ends = [self._up.pop(name)[1] for name in names]
        if ends:
            with ThreadPoolExecutor(len(ends)) as pool:
                for done in [pool.submit(end.close) for end in ends]:
                    done.result()

    def look(self) -> list[int]:
        """See how many bytes of memory each system that is up has now."""
        seen = [apart.memory_bytes() for apart, _ in self._up.values()]
        self._most_bytes = max([self._most_bytes, *seen])
        return seen

    def room(self) -> Room:
        """Whether one more has room in memory."""
        up_bytes = self.look()
        machine = psutil.virtual_memory()
        return Room(machine.total, machine.available, up_bytes, self._most_bytes)

    def idle_cores(self, seconds: float) -> dict[str, float]:
        """How many cores each system keeps busy while nobody asks anything of it."""
        before = {name: apart.cpu_s() for name, (apart, _) in self._up.items()}
        begun_s = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - begun_s
        found = {}
        for name, (apart, _) in self._up.items():
            # What ended meanwhile takes its time with it.
            found[name] = max(0.0, apart.cpu_s() - before[name]) / took_s
        return found
