"""The systems that are compared: which they are, what memory they take, and those that are up."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from conserve_lab.client import Endpoint
from conserve_lab.peers import PEERS, Options
from conserve_lab.peers.apart import Apart, start_apart
from conserve_lab.peers.plan import free_port

_GB = 1e9
# Left to what else the machine does, of all its memory.
_SPARE = 0.05
SYSTEMS = (
    "conserve",
    "elastic",
    "collocated",
    "per_turn",
    "full_disaggregation",
    "ray_serve_llm",
    "ray_pd",
    "vllm",
)
# It gives the rates, and the bounds that others are held to.
FIRST = "conserve"


@dataclass(frozen=True, slots=True)
class Variant:
    """A system as it is measured: its name in reports, the peer, and how that is started."""

    name: str
    peer: str
    options: Options


def names(text: str, *, alone: bool = False) -> list[str]:
    """Names of systems, ConServe's first.

    Args:
        alone: whether they are measured without it, where it is not among them.

    Raises:
        ValueError: there is no such system.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in found if name not in PEERS]:
        raise ValueError(f"systems: no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(found if alone else [FIRST, *found]))


def variants(systems: list[str], wrong_rates: list[float], options: Options) -> list[Variant]:
    """Each system once, ``per_turn`` once for each share of wrong decisions."""
    found = []
    for system in systems:
        if system != "per_turn":
            found.append(Variant(system, system, options))
            continue
        for rate in wrong_rates:
            own = replace(options, wrong_decision_rate=rate)
            found.append(Variant(f"{system}-{100 * rate:g}", system, own))
    return found


@dataclass(frozen=True, slots=True)
class Room:
    """Memory, as it is seen before another system is started.

    Attributes:
        total_bytes: the machine's memory.
        free_bytes: what of it processes can still have.
        up_bytes: what each system that is up has now.
        most_bytes: the most that any system was seen to have so far, at any time. Every other one,
            up or not, is taken to come to that, since all have the same engines.
    """

    total_bytes: int
    free_bytes: int
    up_bytes: Sequence[int]
    most_bytes: int

    @property
    def left_bytes(self) -> float:
        """Return what is left for more systems once those that are up have grown."""
        grow = sum(max(0, self.most_bytes - now) for now in self.up_bytes)
        return self.free_bytes - grow - _SPARE * self.total_bytes

    @property
    def fits(self) -> bool:
        return self.left_bytes >= self.most_bytes

    def told(self) -> str:
        """Say what was seen, in a sentence."""
        verdict = "so one more fits" if self.fits else "so no more fit"
        return (
            f"{self.free_bytes / _GB:.1f} GB of memory are free beside {len(self.up_bytes)} "
            f"system{'s' * (len(self.up_bytes) != 1)}, and one was seen to take "
            f"{self.most_bytes / _GB:.1f} GB: {verdict}"
        )


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
        """How many cores each system keeps busy without requests."""
        before = {name: apart.cpu_s() for name, (apart, _) in self._up.items()}
        begun_s = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - begun_s
        found = {}
        for name, (apart, _) in self._up.items():
            # What ended meanwhile takes its time with it.
            found[name] = max(0.0, apart.cpu_s() - before[name]) / took_s
        return found
