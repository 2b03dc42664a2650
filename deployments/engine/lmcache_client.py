"""LMCache's client, made to notice a server that is lost, and one that only takes long.

It reaches into internals of lmcache 0.5.6 (``_message_queue_client``, ``pending_futures``,
``cancel_streams``, ``submit_request``): check it when that version changes.
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
# The requests that bring a connection back, and so must pass while it is down.
_ALWAYS = ("ping", "get_chunk_size", "get_experimental", *_REGISTRATIONS)
# LMCache waits for a heartbeat's answer as long as it waits between two of them.
PING_TIMEOUT_S = 5.0
# Until a server that starts CUDA, and maps an engine's KV space, has done so.
_REGISTRATION_TIMEOUT_S = 120.0


class Connection:
    """Knows a client's connection to its server.

    Attributes:
        healthy: set unless it is lost.
        losses: how often it was lost; what was asked for before that is not answered any more.
    """

    def __init__(self, healthy: threading.Event) -> None:
        self.healthy = healthy
        self.losses = 0


def wait_for_server(host: str | None, port: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when something listens there: the server starts while the engine loads.

    Raises:
        RuntimeError: nothing listens there in time.
    """
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
        # Called in the thread that owns pending_futures.
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

    A server that moves KV on a busy machine may take more than a second for a heartbeat. Taken for
    lost, it would be asked for nothing until the next one, and first prompts computed twice. A
    registration may have the server start CUDA. Where it is lost, the connection breaks, which ends
    the wait.
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
    """Have a worker register again where its server may have forgotten it.

    The server forgets who has not been heard of for `REAP_TIMEOUT_S`, and goes on to answer that
    one's heartbeats: stores and loads would fail from then on, and nobody would say so. What it
    counts from is when it handled the heartbeat before, which is no earlier than that was sent, to
    when it handles this one, which is before it is answered. So where less time has passed between
    those two, it has forgotten nobody. Registering what is known changes nothing.

    Args:
        register: returns whether it has worked; if not, the connection counts as lost, and LMCache
            tries again.
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
                "LMCache's server heard nothing of this worker for up to %.0f s and may have "
                "forgotten it: registering again", silent_s,
            )  # fmt: skip
            return register()

        answer.result = answered
        return answer

    client.ping = watched_ping


def say_less(adapter: Any) -> None:
    """Leave out what a turn would tell the server though nobody needs it.

    LMCache 0.5.6 sends the token ids of each prompt's blocks, all of a long history at every turn,
    for metrics of its own; and the end of each request, also of one that the server was not asked
    about, which it warns of. Both take the server's time, and with few cores the engine's.

    Args:
        adapter: the scheduler's.
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


# Some 75 ms in all: many times LMCache's own delay, and little beside the prompt's computation.
_PAUSES_S = (0.005, 0.01, 0.02, 0.04)
# A server that takes longer to let go of a look-up hangs.
_FREEING_S = 10.0


@dataclass(slots=True)
class _Wait:
    tries: int = 0
    again_s: float | None = None
    # The server is to have let go of the last look-up before the next.
    freeing: list[Any] = field(default_factory=list)
    missed_tokens: int = 0


@dataclass(slots=True)
class LateKV:
    """Which look-ups are to be repeated, and what came of them."""

    clock: Callable[[], float] = time.monotonic
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def waits(self, request_id: str) -> bool:
        """Whether it is too early for another look-up."""
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

    def looks_again(self, request_id: str, missed_tokens: int) -> bool:
        """Whether a prompt of which so much was not found is to be looked up once more."""
        wait = self._waits.setdefault(request_id, _Wait())
        wait.missed_tokens = missed_tokens
        if not missed_tokens or wait.tries >= len(_PAUSES_S):
            return False
        wait.again_s = self.clock() + _PAUSES_S[wait.tries]
        wait.tries += 1
        return True

    def frees(self, request_id: str, futures: list[Any]) -> None:
        """The server was asked to let go of what the last look-up found."""
        self._waits[request_id].freeing = futures

    def over(self, request_id: str) -> tuple[bool, int]:
        """A request has ended: whether it was looked up again, and what was missed at last."""
        wait = self._waits.pop(request_id, _Wait())
        return wait.tries > 0, wait.missed_tokens
