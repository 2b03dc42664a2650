"""Starts a peer, waits until it serves and is warm, and stops all that it started."""

import contextlib
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.machine import environment
from benchmarks.peers import (
    collocated,
    conserve,
    elastic,
    full_disaggregation,
    per_turn,
    ray_pd,
    ray_serve_llm,
    vllm,
    vllm_router,
)
from benchmarks.peers.options import Options
from benchmarks.peers.pinning import engine_processes, pin
from benchmarks.peers.plan import PeerPlan, PeerUnavailable
from benchmarks.peers.waiting import answers, serves, until_ready, warm_up
from conserve.launch import Launch

PEERS = {
    peer.NAME: peer
    for peer in (
        conserve,
        elastic,
        ray_serve_llm,
        ray_pd,
        vllm,
        vllm_router,
        collocated,
        per_turn,
        full_disaggregation,
    )
}


@dataclass(frozen=True)
class Peer:
    """A peer that is up and warm.

    Attributes:
        name: its key in `PEERS`.
        url: its server's URL, without ``/v1``.
        model: the name to ask it for.
        session_header: the request header by which it tells conversations apart, if it does.
        min_tokens: whether it takes requests with ``min_tokens``.
        described: how it was started, for reports: command lines and what they add to the
            environment, engine arguments, engines, cores, logs, versions.
    """

    name: str
    url: str
    model: str
    session_header: str | None
    min_tokens: bool
    described: dict[str, Any]


@contextlib.contextmanager
def start(
    name: str, options: Options | None = None, on_progress: Callable[[str], None] | None = None
) -> Iterator[Peer]:
    """Have a peer up and warm for the time of a ``with`` block.

    When it stops it ends every descendant of this process, as `conserve.launch.Launch` does. So
    several peers at a time go into nested blocks, and a process that is to outlive a peer
    belongs under another parent.

    Args:
        name: a key of `PEERS`.
        options: what every peer is started with.
        on_progress: called with what is waited for.

    Raises:
        ValueError: there is no such peer.
        PeerUnavailable: it cannot run here, with the reason in one line.
    """
    if name not in PEERS:
        raise ValueError(f"no peer {name!r}: there are {', '.join(PEERS)}")
    options = options or Options()
    report = on_progress or (lambda text: None)
    plan: PeerPlan = PEERS[name].plan(options)
    url = f"http://127.0.0.1:{options.port}"
    _require_free(options.port)
    logs = options.logs or Path(tempfile.mkdtemp(prefix=f"peer-{name}-"))
    deadline_s = time.monotonic() + options.timeout_s
    model = options.served_model
    older = {process.pid for process in engine_processes()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        for part in plan.parts:
            report(f"starting {part.name}")
            log = logs / f"{part.name}.log"
            launch = Launch([], log, part.environment, part.command)
            # Its stop is noted first: an interrupt in between must not leave its process behind.
            stack.callback(launch.stop)
            launch.__enter__()
            if part.ready_url is not None:
                ready = partial(answers, part.ready_url)
            else:
                ready = partial(serves, url, model, plan)
            until_ready(part.name, launch, log, ready, deadline_s)
        report("warming up")
        try:
            warm_up(url, model, plan, deadline_s)
        except PeerUnavailable as error:
            raise PeerUnavailable(f"{error} (logs: {logs})") from None
        engines = [process for process in engine_processes() if process.pid not in older]
        pinned = _pinned(engines, options)
        described = _described(options, plan, pinned, logs)
        yield Peer(name, url, model, plan.session_header, plan.min_tokens, described)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have a plain `kill` or a closed terminal end the block as Ctrl-C does: with its processes.

    This works in the main thread alone, and only where the caller has not said otherwise.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _require_free(port: int) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        raise PeerUnavailable(f"port {port} is in use: stop what serves there, or choose another")


def _pinned(engines: list[Any], options: Options) -> list[list[int]] | None:
    if options.cores is None:
        return None
    try:
        return pin(engines, options.cores)
    except (OSError, ValueError) as error:
        raise PeerUnavailable(f"engines cannot be pinned to cores: {error}") from None


def _described(
    options: Options, plan: PeerPlan, cores: list[list[int]] | None, logs: Path
) -> dict[str, Any]:
    return {
        "processes": [
            {
                "name": part.name,
                "command": list(part.command),
                "environment": dict(part.environment),
            }
            for part in plan.parts
        ],
        "model": options.model_source,
        "engines": plan.engines,
        "prefillers": plan.prefillers,
        "engine_arguments": {role: dict(own) for role, own in plan.engine_arguments.items()},
        "cores": cores,
        "gpu": options.gpu,
        "logs": str(logs),
        **environment(),
    }
