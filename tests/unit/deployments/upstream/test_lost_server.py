"""Calls that are open when the connection to an LMCache server is lost."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueClient

from deployments.upstream.lost_server import fail_fast


@pytest.fixture
def noticed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once LMCache's client has noticed the loss, and done what it does."""
    event, own = threading.Event(), MessageQueueClient.cancel_streams

    def cancel_streams(self: Any) -> None:
        own(self)
        event.set()

    monkeypatch.setattr(MessageQueueClient, "cancel_streams", cancel_streams)
    return event


@pytest.fixture
def served(noticed: threading.Event) -> Iterator[tuple[Any, Any]]:
    """LMCache's client, and the socket of its server."""
    context = zmq.Context()
    context.linger = 0
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=context)
    yield client, server
    client.close()
    context.destroy()


def _lose(server: Any, noticed: threading.Event) -> None:
    assert server.poll(30_000)
    server.close(linger=0)
    assert noticed.wait(30)


def test_they_wait_on(served: tuple[Any, Any], noticed: threading.Event) -> None:
    client, server = served
    asked = client.end_session("r")
    _lose(server, noticed)
    assert not asked.query()


def test_patched_they_end_and_others_are_refused_until_it_is_back(
    served: tuple[Any, Any], noticed: threading.Event
) -> None:
    client, server = served
    healthy = threading.Event()
    healthy.set()
    connection = fail_fast(client, healthy)
    asked = client.end_session("r")
    _lose(server, noticed)
    assert (healthy.is_set(), connection.losses) == (False, 1)
    said = []
    for call in (asked, client.end_session("r")):
        with pytest.raises(TimeoutError, match="connection to the LMCache server is lost") as lost:
            call.result(0)
        said.append(lost.value)
    # One for all would keep the frames of each call that raised it.
    assert said[0] is not said[1]
    # What finds out whether it is back has to pass.
    assert not client.ping(1).query()
    healthy.set()
    assert not client.end_session("r").query()
