"""Connections whose client closes its side, and those whose client offers another protocol."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.router.router import Connection
from tests.unit.deployments import asgi

# In which a connection is looked after several times.
WHILE_S = 0.5
MISSED_S = 20.0


class Application:
    """Answers when it is told to, in one piece or as a stream, and notes whether a client left."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self.began = threading.Event()
        self.goes_on = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message["body"]
            if not message["more_body"]:
                break
        leaving = asyncio.ensure_future(self._leaves(receive))
        try:
            answer = self._stream if scope["path"] == "/stream" else self._whole
            serving = asyncio.ensure_future(answer(send, body))
            await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
            # Behind an answer uvicorn says so of every client.
            if not serving.done():
                self.left.set()
        finally:
            serving.cancel()
            leaving.cancel()

    async def _leaves(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _whole(self, send: Any, body: bytes) -> None:
        self.began.set()
        await self._told_to_go_on()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any, body: bytes) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        self.began.set()
        await self._told_to_go_on()
        for part in (b"second " * 20, body):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _told_to_go_on(self) -> None:
        while not self.goes_on.is_set():  # noqa: ASYNC110  # The test is another thread.
            await asyncio.sleep(0.01)


@contextmanager
def listening(
    loop: Literal["asyncio", "uvloop"],
    protocol: type[HttpToolsProtocol] = Connection,
    **options: Any,
) -> Iterator[tuple[Application, int]]:
    """An application and the port that it listens on."""
    application = Application()
    config = uvicorn.Config(
        application,
        http=protocol,
        loop=loop,
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=1,
        **options,
    )
    with asgi.listening(config) as port:
        yield application, port


@pytest.fixture(params=["asyncio", "uvloop"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Application, int]]:
    """By either of the event loops that Ray may run a router on."""
    with listening(request.param) as found:
        yield found


def asked(port: int, path: str, body: bytes = b"hello") -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("POST", path, body)
    return client


def half_close(client: http.client.HTTPConnection) -> None:
    assert client.sock is not None
    client.sock.shutdown(socket.SHUT_WR)


def test_with_uvicorn_alone_who_waits_gets_no_answer() -> None:
    with listening("asyncio", HttpToolsProtocol) as (application, port):
        client = asked(port, "/whole")
        assert application.began.wait(MISSED_S)
        half_close(client)
        assert application.left.wait(MISSED_S)
        application.goes_on.set()
        with pytest.raises(http.client.RemoteDisconnected):
            client.getresponse()


def test_who_waits_gets_an_answer(served: tuple[Application, int]) -> None:
    application, port = served
    client = asked(port, "/whole")
    half_close(client)
    time.sleep(WHILE_S)
    assert not application.left.is_set()
    application.goes_on.set()
    response = client.getresponse()
    assert (response.status, response.read()) == (200, b"hello")
    # Nothing more can come, so it is not kept for more.
    assert client.sock is not None
    assert client.sock.recv(1) == b""


@pytest.mark.parametrize("body", [b"hello", b""], ids=["a chunk next", "the last chunk next"])
def test_who_waits_in_the_middle_gets_the_rest(
    served: tuple[Application, int], body: bytes
) -> None:
    application, port = served
    client = asked(port, "/stream", body)
    response = client.getresponse()
    assert response.read(6) == b"first "
    half_close(client)
    time.sleep(WHILE_S)
    assert not application.left.is_set()
    application.goes_on.set()
    assert response.read() == b"second " * 20 + body


def test_who_leaves_before_an_answer_is_missed(served: tuple[Application, int]) -> None:
    application, port = served
    client = asked(port, "/whole")
    assert application.began.wait(MISSED_S)
    client.close()
    # Though nothing is answered that would find it gone.
    assert application.left.wait(MISSED_S)


def test_who_leaves_a_stream_is_missed_though_nothing_is_sent(
    served: tuple[Application, int],
) -> None:
    application, port = served
    client = asked(port, "/stream")
    response = client.getresponse()
    assert response.read(6) == b"first "
    response.close()
    client.close()
    assert application.left.wait(MISSED_S)


def test_a_request_that_ends_too_soon_gets_no_answer(served: tuple[Application, int]) -> None:
    application, port = served
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert application.left.wait(MISSED_S)


def test_requests_in_a_row_are_all_answered(served: tuple[Application, int]) -> None:
    application, port = served
    application.goes_on.set()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        for body in (b"one", b"two"):
            head = b"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
            client.sendall(head + body)
        client.shutdown(socket.SHUT_WR)
        read = b"".join(iter(lambda: client.recv(4096), b""))
    assert read.count(b"HTTP/1.1 200 OK") == 2
    assert read.index(b"one") < read.index(b"two")


def test_older_clients_are_sent_nothing_that_they_do_not_know(
    served: tuple[Application, int],
) -> None:
    """In HTTP/1.0 the first line is the answer's, so who ends its side has left."""
    application, port = served
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"POST /whole HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert application.left.wait(MISSED_S)


# --- Offers of other protocols --------------------------------------------------------------------

SETTINGS = "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"
OFFERS = [
    f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n{SETTINGS}",
    "upgrade: TLS/1.2\r\nConnection: upgrade",
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13",
]


def asking(offer: str, body: str = "", framing: str = "", method: str = "POST") -> bytes:
    if framing == "chunked":
        body = "".join(f"1;x=1\r\n{one}\r\n" for one in body) + "0\r\nX-Trailer: 1\r\n\r\n"
    how = "Transfer-Encoding: chunked" if framing == "chunked" else f"Content-Length: {len(body)}"
    return f"{method} /whole HTTP/1.1\r\nHost: x\r\n{offer}\r\n{how}\r\n\r\n{body}".encode()


def exchanged(client: socket.socket, sent: bytes, piece: int) -> list[bytes]:
    """Return the statuses and bodies of answers, after a request that ends the connection."""
    sent += asking("Connection: close", "last")
    for at in range(0, len(sent), piece):
        client.sendall(sent[at : at + piece])
    read = b"".join(iter(lambda: client.recv(4096), b""))
    answers = [one.partition(b"\r\n\r\n") for one in read.split(b"HTTP/1.1 ")[1:]]
    return [head[:4] + body for head, _, body in answers]


def test_with_uvicorn_alone_a_request_with_an_offer_loses_its_body() -> None:
    with listening("asyncio", HttpToolsProtocol) as (application, port):
        application.goes_on.set()
        with socket.create_connection(("127.0.0.1", port), timeout=MISSED_S) as client:
            client.sendall(asking(OFFERS[0], "hello"))
            assert client.recv(4096).endswith(b"content-length: 0\r\n\r\n")


@pytest.mark.parametrize("piece", [1, 10**6], ids=["bytes", "all"])
@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "TLS", "websocket"])
def test_an_offer_is_ignored(served: tuple[Application, int], offer: str, piece: int) -> None:
    """Several requests share a connection, as one packet or byte by byte."""
    application, port = served
    application.goes_on.set()
    sent = asking(offer, "one") + asking(offer, "two", "chunked") + asking(offer, method="GET")
    with socket.create_connection(("127.0.0.1", port), timeout=MISSED_S) as client:
        answers = exchanged(client, sent + asking("X: 1", "4") + asking(offer, "5"), piece)
    assert answers == [b"200 one", b"200 two", b"200 ", b"200 4", b"200 5", b"200 last"]
