"""Starts a peer, waits until it serves and is warm, and stops all that it started."""

import contextlib
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from conserve.launch import Launch
from conserve_lab.machine import environment
from conserve_lab.peers.pinning import engine_processes, pin
from conserve_lab.peers.plan import Options, PeerPlan, PeerUnavailable
from conserve_lab.peers.systems import PEERS

_POLL_S = 0.5
_ANSWER_S = 15.0
# Conversations for each engine until it counts as warm: where a hash of its name chooses a
# conversation's engine, the chance that one of N engines gets none is about N * exp(-6).
_WARM_CONVERSATIONS = 6
_WARM_WORDS = 250
_WARM_TOKENS = 8
_LAST_LINES = 3
_LONGEST_LINE = 300


@dataclass(frozen=True)
class Peer:
    """A peer that is up and warm.

    ``described`` is how it was started, for reports: command lines and what they add to the
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
    several peers at a time go into nested blocks, and a process that outlives a peer belongs under
    another parent.

    Raises:
        ValueError: there is no such peer.
        PeerUnavailable: it cannot run here, with the reason in one line.
    """
    if name not in PEERS:
        raise ValueError(f"no peer {name!r}: there are {', '.join(PEERS)}")
    options = options or Options()
    report = on_progress or (lambda text: None)
    plan = PEERS[name](options)
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
    """Have a plain `kill` or a closed terminal end the block as Ctrl-C does, in the main thread."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


# --- When it is up, and warm ---------------------------------------------------------------------


def until_ready(
    part: str, launch: Launch, log: Path, ready: Callable[[], bool], deadline_s: float
) -> None:
    """Wait until ``ready`` says that a part of a peer is; PeerUnavailable: it ended, or took too
    long.
    """
    while not ready():
        if not launch.running:
            raise PeerUnavailable(f"{part} ended while it started: {last_words(log)}")
        if time.monotonic() > deadline_s:
            raise PeerUnavailable(f"{part} was not ready in time: {last_words(log)}")
        time.sleep(_POLL_S)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=_ANSWER_S).status_code == 200
    return False


def serves(url: str, model: str, plan: PeerPlan) -> bool:
    """Whether all engines are up: as ``/health`` counts them, else as the model is listed."""
    if not plan.releases:
        names = [str(entry.get("id")) for entry in _body(url + "/v1/models").get("data", [])]
        return model in names
    health = _body(url + "/health")
    prefillers, decoders = int(health.get("prefillers", 0)), int(health.get("decoders", 0))
    return prefillers >= plan.prefillers and decoders >= plan.decoders


def _body(url: str) -> dict[str, Any]:
    try:
        body = httpx.get(url, timeout=_ANSWER_S).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def warm_up(url: str, model: str, plan: PeerPlan, deadline_s: float) -> None:
    """Run conversations of two turns on all engines, and forget them; PeerUnavailable: a turn
    fails.
    """
    names = [f"warm-up-{secrets.token_hex(8)}" for _ in range(_WARM_CONVERSATIONS * plan.engines)]
    headers: list[dict[str, str]] = [
        {plan.session_header: name} if plan.session_header else {} for name in names
    ]
    try:
        with httpx.Client(base_url=url, timeout=max(1.0, deadline_s - time.monotonic())) as client:
            for name, header in zip(names, headers, strict=True):
                if time.monotonic() > deadline_s:
                    raise PeerUnavailable("its first turns were not done in time")
                _two_turns(client, model, name, header)
            if plan.releases:
                for name in names:
                    client.delete(f"/v1/conversations/{name}").raise_for_status()
    except httpx.HTTPStatusError as error:
        reply = error.response
        reason = " ".join(reply.text.split())[:_LONGEST_LINE]
        raise PeerUnavailable(f"a first turn was refused: {reply.status_code} {reason}") from None
    except httpx.HTTPError as error:
        raise PeerUnavailable(f"a first turn failed: {type(error).__name__} {error}") from None


def _two_turns(client: httpx.Client, model: str, name: str, header: dict[str, str]) -> None:
    messages = [{"role": "user", "content": f"{name} " + "word " * _WARM_WORDS}]
    for _ in range(2):
        body = {"model": model, "messages": messages, "max_tokens": _WARM_TOKENS}
        reply = client.post("/v1/chat/completions", json=body, headers=header).raise_for_status()
        answer = reply.json()["choices"][0]["message"]["content"] or ""
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "word " * 20},
        ]


def last_words(log: Path) -> str:
    """Return the last errors in a log, else its last lines, in one line that names it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    told = [line for line in lines if "Error" in line or "error:" in line] or lines
    shown = " | ".join(line[-_LONGEST_LINE:] for line in told[-_LAST_LINES:])
    return f"{shown or 'it said nothing'} (log: {log})"
