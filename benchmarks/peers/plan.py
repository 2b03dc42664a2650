"""Describes as data how to run one peer; `benchmarks.peers.running` carries it out."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.node.lmcache_server import free_port as free_listening_port

# What `conserve bench` sends by itself. A peer that can be told a name is told this one.
CONVERSATION_HEADER = "X-Conversation-Id"

_given: set[int] = set()


@dataclass(frozen=True)
class Part:
    """A process of a peer.

    Attributes:
        name: names its log file.
        command: its command line.
        environment: variables on top of this process's own.
        ready_url: answers 200 when the next part may start. The last part has none: it is
            ready when it lists the model.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None


@dataclass(frozen=True)
class PeerPlan:
    """A peer's processes, in the order in which they start.

    Attributes:
        parts: the processes; the last one serves.
        engine_arguments: vLLM's arguments, by role.
        prefillers: engines that only prefill.
        decoders: the other engines.
        session_header: the request header by which it tells conversations apart, if it does.
        releases: whether it wants to be told when a conversation has ended, as ConServe does.
        min_tokens: whether it takes requests with ``min_tokens``.
    """

    parts: tuple[Part, ...]
    engine_arguments: Mapping[str, Mapping[str, Any]]
    prefillers: int
    decoders: int
    session_header: str | None = CONVERSATION_HEADER
    releases: bool = False
    min_tokens: bool = True

    @property
    def engines(self) -> int:
        """Engines that the plan starts."""
        return self.prefillers + self.decoders


class PeerUnavailable(RuntimeError):
    """A peer cannot run here; the message is one line with the reason."""


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a Python module."""
    return (sys.executable, "-m", name, *arguments)


def free_port() -> int:
    """A port on loopback that nobody has, and that was not given to another part before.

    It is not one that the system hands out: a part binds it many seconds later, and by then an
    outgoing connection could have it, or the next caller.
    """
    port = free_listening_port("127.0.0.1", _given)
    _given.add(port)
    return port


def require_two(engines: int, name: str) -> None:
    """Refuse to disaggregate a single engine.

    Raises:
        PeerUnavailable: there is just one.
    """
    if engines < 2:
        raise PeerUnavailable(f"{name} needs a prefiller and a decoder: set engines to 2 or more")
