"""LMCache's client, made to notice a server that is lost, and one that only takes long.

Internals of lmcache 0.5.6 that are used: ``_message_queue_client``, ``pending_futures``,
``cancel_streams``, ``submit_request``. Check them when the version changes.
"""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture

from deployments.node.lmcache_server import REAP_TIMEOUT_S, START_TIMEOUT_S

logger = init_logger(__name__)

_REGISTRATIONS = ("register_kv_cache", "register_kv_cache_engine_driven_context")
# Requests that bring a connection back, so they must pass while it is down.
_ALWAYS = ("ping", "get_chunk_size", "get_experimental", *_REGISTRATIONS)
# LMCache itself waits for a heartbeat's answer no longer than between two of them.
PING_TIMEOUT_S = 5.0
# A server may have to start CUDA, and to map an engine's KV space.
_REGISTRATION_TIMEOUT_S = 120.0


class Connection:
    """A client's connection to its server, and how often it was lost."""

    def __init__(self, healthy: threading.Event) -> None:
        self.healthy = healthy
        self.losses = 0


def wait_for_server(host: str | None, port: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for the server, which starts while the engine loads, or raise `RuntimeError`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host or "", port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise RuntimeError(
                    f"no LMCache server at {host}:{port} after {timeout_s:g} s ({error}); see the "
                    "node actor's log"
                ) from None
        time.sleep(0.1)


def fail_fast(client: Any, healthy: threading.Event) -> Connection:
    """End every open call when the connection is lost, and refuse new ones until it is back."""
    queue = client._message_queue_client
    submit, cancel_streams = queue.submit_request, queue.cancel_streams
    lost = TimeoutError("the connection to the LMCache server is lost")
    connection = Connection(healthy)

    def connection_lost() -> None:
        # Runs in the thread that owns pending_futures.
        healthy.clear()
        connection.losses += 1
        for future, _ in queue.pending_futures.values():
            future.set_exception(lost)
        queue.pending_futures.clear()
        cancel_streams()

    def submit_request(operation: str, payloads: Any) -> Any:
        if healthy.is_set() or operation in _ALWAYS:
            return submit(operation, payloads)
        future = MessagingFuture()
        future.set_exception(lost)
        return future

    queue.cancel_streams = connection_lost
    queue.submit_request = submit_request
    return connection


def be_patient(client: Any, ping_timeout_s: float = PING_TIMEOUT_S) -> None:
    """Have heartbeats and registrations wait longer for their answers.

    A server that moves KV on a busy machine may take more than a second for a heartbeat, and a
    registration may have it start CUDA. A broken connection ends the wait.
    """
    client.ping = _patient(client.ping, ping_timeout_s)
    for name in _REGISTRATIONS:
        setattr(client, name, _patient(getattr(client, name), _REGISTRATION_TIMEOUT_S))


def _patient(ask: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    def asked(*given: Any) -> Any:
        answer = ask(*given)
        result = answer.result
        answer.result = lambda timeout=None: result(max(timeout or 0.0, timeout_s))
        return answer

    return asked


def register_after_silence(
    client: Any, register: Callable[[], bool], clock: Callable[[], float] = time.monotonic
) -> None:
    """Have a worker ``register`` again where its server may have forgotten it.

    The server forgets a worker that is silent for `REAP_TIMEOUT_S`, yet answers its heartbeats:
    stores and loads would fail without an error. Its silence lasts at most from when the last
    heartbeat was sent to when this one is answered. If registering fails, LMCache tries again.
    """
    ping = client.ping
    sent_s = clock()

    def watched_ping(instance_id: int | None) -> Any:
        nonlocal sent_s
        before_s, sent_s = sent_s, clock()
        answer = ping(instance_id)
        result = answer.result

        def answered(timeout: float | None = None) -> bool:
            alive: bool = result(timeout)
            silent_s = clock() - before_s
            if not alive or silent_s < REAP_TIMEOUT_S:
                return alive
            logger.warning(
                "LMCache's server did not hear from this worker for up to %.0f s and may have "
                "forgotten it: registering again", silent_s,
            )  # fmt: skip
            return register()

        answer.result = answered
        return answer

    client.ping = watched_ping


def say_less(adapter: Any) -> None:
    """Leave out messages of the scheduler's adapter to the server that nothing needs.

    LMCache 0.5.6 sends the token ids of all blocks of a prompt at every turn, for metrics of its
    own, and the end of requests that the server was not asked about, which it warns of.
    """
    asked: set[str] = set()
    look_up, end = adapter.maybe_submit_lookup_request, adapter.end_session

    def look_up_known(request_id: str, *given: Any, **named: Any) -> None:
        asked.add(request_id)
        look_up(request_id, *given, **named)

    def end_known(request_id: str) -> None:
        if request_id in asked:
            asked.remove(request_id)
            end(request_id)

    adapter.maybe_submit_lookup_request = look_up_known
    adapter.end_session = end_known


# Pauses before a prompt is looked up again: 75 ms in all, many times LMCache's own delay, and short
# beside the prompt's computation.
_PAUSES_S = (0.005, 0.01, 0.02, 0.04)
# A server that takes longer to release a look-up hangs.
_FREEING_S = 10.0


@dataclass(slots=True)
class _Wait:
    tries: int = 0
    again_s: float | None = None
    # Releases of the last look-up, which come before the next.
    freeing: list[Any] = field(default_factory=list)
    missed_tokens: int = 0


@dataclass(slots=True)
class LateKV:
    """Looks up again prompts that a prefiller has just stored, and that are not found yet.

    On a GPU a store is done, for the engine that asked for it, when its copy is. LMCache's server
    announces it within 5 ms. A decoder that asks in between would compute the whole prompt again.
    """

    clock: Callable[[], float] = time.monotonic
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def waits(self, request_id: str) -> bool:
        wait = self._waits.get(request_id)
        if wait is None or wait.again_s is None:
            return False
        over_s = self.clock() - wait.again_s
        freed = over_s > _FREEING_S or all(future.query() for future in wait.freeing)
        if over_s < 0 or not freed:
            return True
        wait.again_s = None
        wait.freeing.clear()
        return False

    def looks_again(self, request_id: str, missed_tokens: int, answers: bool = True) -> bool:
        """Return whether to look a prompt up once more, given how much of it was not found.

        Args:
            answers: whether LMCache's server does.
        """
        wait = self._waits.setdefault(request_id, _Wait())
        wait.missed_tokens = missed_tokens
        if not missed_tokens or not answers or wait.tries >= len(_PAUSES_S):
            return False
        wait.again_s = self.clock() + _PAUSES_S[wait.tries]
        wait.tries += 1
        return True

    def frees(self, request_id: str, futures: list[Any]) -> None:
        self._waits[request_id].freeing = futures

    def over(self, request_id: str) -> tuple[bool, int]:
        """Return whether an ended request was looked up again, and how many tokens were missed."""
        wait = self._waits.pop(request_id, _Wait())
        return wait.tries > 0, wait.missed_tokens
