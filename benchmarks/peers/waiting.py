"""When a peer is up, and how it is made warm."""

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peers.plan import PeerPlan, PeerUnavailable
from conserve.launch import Launch

_POLL_S = 0.5
_ANSWER_S = 15.0
# Conversations for each engine until it counts as warm: where a hash of its name chooses a
# conversation's engine, the chance that one of N engines gets none is about N * exp(-6).
_WARM_CONVERSATIONS = 6
_WARM_WORDS = 250
_WARM_TOKENS = 8
_LAST_LINES = 3
_LONGEST_LINE = 300


def until_ready(
    part: str, launch: Launch, log: Path, ready: Callable[[], bool], deadline_s: float
) -> None:
    """Return when a part of a peer is ready.

    Args:
        part: the part's name.
        launch: the part's process.
        log: that process's log file.
        ready: asks the part whether it is ready.
        deadline_s: when to give up, by the monotonic clock.

    Raises:
        PeerUnavailable: the part ended, or was not ready in time.
    """
    while not ready():
        if not launch.running:
            raise PeerUnavailable(f"{part} ended while it started: {last_words(log)}")
        if time.monotonic() > deadline_s:
            raise PeerUnavailable(f"{part} was not ready in time: {last_words(log)}")
        time.sleep(_POLL_S)


def answers(url: str) -> bool:
    """Whether something answers there with 200."""
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
    """Run conversations of two turns on all engines, and forget them.

    Raises:
        PeerUnavailable: a turn fails, or the deadline passes.
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
    """The last errors in a log, else its last lines, in one line that names it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    told = [line for line in lines if "Error" in line or "error:" in line] or lines
    shown = " | ".join(line[-_LONGEST_LINE:] for line in told[-_LAST_LINES:])
    return f"{shown or 'it said nothing'} (log: {log})"
