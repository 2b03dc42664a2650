"""A peer, started; a conversation with it, and what it counts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from conserve_lab.peers import Options, Peer, start
from conserve_lab.peers.pinning import engine_processes
from conserve_lab.peers.plan import free_port
from tests.engines.applications import START_S
from tests.engines.metrics import metric

FIRST = "open read file class return import value index " * 60
LATER = "close the file and print what was read"


@contextmanager
def started(name: str, logs: Path, **options: object) -> Iterator[Peer]:
    """The peer, ready."""
    chosen = Options(port=free_port(), logs=logs, timeout_s=START_S, **options)  # type: ignore[arg-type]
    with start(name, chosen) as peer:
        assert peer.model == "conserve-embedded"
        assert peer.described["engines"] == len(engine_processes())
        yield peer


def converse(peer: Peer, name: str, turns: int = 3, later: str = LATER) -> list[int]:
    """Some turns; how many tokens of each prompt were found in caches."""
    headers = {peer.session_header: name} if peer.session_header else {}
    messages: list[dict[str, str]] = []
    cached = []
    for turn in range(turns):
        messages.append({"role": "user", "content": later if turn else f"{name} {FIRST}"})
        body = {
            "model": peer.model,
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
        }
        reply = httpx.post(
            peer.url + "/v1/chat/completions", json=body, headers=headers, timeout=180
        )
        assert reply.status_code == 200, reply.text
        answer = reply.json()["choices"][0]["message"]["content"]
        assert answer.strip()
        messages.append({"role": "assistant", "content": answer})
        cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached


def counted(peer: Peer, *names: str) -> list[float]:
    """Counters of ConServe's, by their names without what all have in common."""
    page = httpx.get(peer.url + "/metrics", timeout=30).text
    return [metric(f"conserve_{name}_total", page) for name in names]


def threads(engine: psutil.Process) -> list[int]:
    """Ids of all threads of an engine's processes."""
    processes = [engine, *engine.children(recursive=True)]
    return [thread.id for process in processes for thread in process.threads()]


def affinity(pid: int) -> list[int]:
    """The cores that a thread may run on."""
    return sorted(os.sched_getaffinity(pid))
