"""Has calls to an LMCache server end as its connection is lost, and fail until it is back.

LMCache 0.5.6 ends only subscriptions then. Each open call, and each new one, waits for the timeout
of its answer, and so does the engine's step that asked.
"""

import threading
from typing import Any

from deployments.upstream.patch import Patch, of

# Requests that bring a connection back, so they must pass while it is down.
_ALWAYS = (
    "ping", "get_chunk_size", "get_experimental", "register_kv_cache",
    "register_kv_cache_engine_driven_context",
)  # fmt: skip


class Connection:
    """A client's connection to its server, and how often it was lost."""

    losses = 0


def fail_fast(client: Any, healthy: threading.Event) -> Connection:
    """End every open call when the connection is lost, and refuse new ones until it is back."""
    from lmcache.v1.multiprocess.futures import MessagingFuture

    queue = client._message_queue_client
    submit, cancel_streams = queue.submit_request, queue.cancel_streams
    connection = Connection()

    def fail(future: Any) -> None:
        # One exception for all would keep the frames that raised it, and the memory that they map.
        future.set_exception(TimeoutError("the connection to the LMCache server is lost"))

    def connection_lost() -> None:
        # Runs in the thread that owns pending_futures.
        healthy.clear()
        connection.losses += 1
        for future, _ in queue.pending_futures.values():
            fail(future)
        queue.pending_futures.clear()
        cancel_streams()

    def submit_request(operation: str, payloads: Any) -> Any:
        if healthy.is_set() or operation in _ALWAYS:
            return submit(operation, payloads)
        future = MessagingFuture()
        fail(future)
        return future

    queue.cancel_streams = connection_lost
    queue.submit_request = submit_request
    return connection


_CLIENT = "lmcache.v1.multiprocess.transport.zmq_impl"
PATCH = Patch(
    name="lost_server",
    seams=(
        *of(f"{_CLIENT}.mq:MessageQueueClient", "submit_request cancel_streams pending_futures"),
        f"{_CLIENT}.client:ZmqMultiprocessClient._message_queue_client",
    ),
    why="answers stop for as long as a message may take, whenever an LMCache server is killed",
    upstream="not reported: at EVENT_DISCONNECTED pending_futures wait (near: LMCache#4642)",
    process="connector",
)
