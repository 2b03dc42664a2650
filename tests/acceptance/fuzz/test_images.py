"""Whatever a client sends as an image is seen or refused, and shows nothing of the server."""

import base64
import json
import logging
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from schemathesis import Case, Response

from tests.acceptance.fuzz.cases import CHAT, JSON, MESSAGE, RESPONSE, described
from tests.acceptance.fuzz.trial import Wrong, try_all
from tests.engines.applications import SIGHTED
from tests.engines.client import engines
from tests.engines.metrics import metric
from tests.pictures import REFUSED, SERVED

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.full, pytest.mark.application(SIGHTED)]

# `make test-fuzz` tries one request with images for this many others.
_ONE_IN = 5
_LEAST = 60
# Most clients wait for their answer; on a busy machine it may take long.
_PATIENCE_S = (0.05, 0.5, 60.0, 60.0, 60.0)
# What is not served, by what its refusal says.
_LIES = {
    "not base64": ("data:image/png;base64,????", "valid base64"),
    "cut base64": ("data:image/png;base64,iVBORw0KGg", "valid base64"),
    "plain": ("data:image/svg+xml,<svg/>", "data: URL in base64"),
    "no url": (None, ""),
    "a number": (7, ""),
    "a file": ("file:///etc/passwd", "data:, http: or https: URL"),
    "gopher": ("gopher://127.0.0.1:6379/_INFO", "data:, http: or https: URL"),
    "not allowed": ("https://images.example/a.png", "allowed_media_domains"),
    "lies": ("http://localhost@images.example/a.png", "allowed_media_domains"),
    "a name of ours": ("data:image/png;conserve=f00;base64,bm8=", "no image that can be read"),
}
# Names that the application may fetch from, all of which stand for addresses that it may not.
_HOSTS = ("127.0.0.1", "localhost", "2130706433", "017700000001", "[::1]", "[::ffff:127.0.0.1]",
          "169.254.169.254", "10.0.0.1")  # fmt: skip
_PART = re.compile(r"(messages|input)[.\[]\d+")
# What a server without a network cannot resolve it does not connect to either.
_NOT_CONNECTED = "not public|no connection to its server"
# A part of a message that says so shows what the server is made of.
_SHOWS = re.compile(r"/(tmp|home|root|usr|work|dev|proc)/|site-packages|Traceback|0x[0-9a-f]{6}|"
                    r"BytesIO|PIL|pydantic|vllm/|root:|127\.0\.0\.1|Errno")  # fmt: skip


@contextmanager
def _watched_port() -> Iterator[tuple[int, list[Any]]]:
    """A port of this machine, and who has connected to it."""
    seen: list[Any] = []
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:

        def accept() -> None:
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                seen.append(address)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], seen


def _url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class _Cases:
    """Turns with images, and what is to become of each, drawn from a seed."""

    def __init__(self, document: dict[str, Any], port: int, seed: int) -> None:
        schema = described(document)
        found = [operation.ok() for operation in schema.get_all_operations()]
        self._operations = {one.label: one for one in found}
        self._rng = random.Random(seed)
        self._port = port
        # By a case's id: what its refusal says, a pattern; None: it is served; "?": either.
        self.expected: dict[int, str | None] = {}
        self._made: list[Case] = []

    def drawn(self, count: int) -> Iterator[Case]:
        kinds = [("served", *one) for one in SERVED.items()]
        kinds += [("refused", *one) for one in REFUSED.items()]
        kinds += [("lie", *one) for one in _LIES.items()]
        kinds += [("host", host, host) for host in _HOSTS]
        kinds += [("broken", *one) for one in SERVED.items()]
        kinds += [("uuid", "unknown", None), ("many", "too many", None)]
        for number in range(count):
            kind, _, what = kinds[number % len(kinds)]
            label = (CHAT, MESSAGE, RESPONSE)[self._rng.randrange(3)]
            yield self._case(label, kind, what)

    def _case(self, label: str, kind: str, what: Any) -> Case:
        rng, said = self._rng, None
        more: dict[str, Any] = {}
        if kind == "served":
            urls = [_url(what[0], rng.choice((what[1], "image/png", "text/html")))]
        elif kind == "refused":
            urls, said = [_url(what[0])], re.escape(what[1])
        elif kind == "lie":
            urls, said = [what[0]], re.escape(what[1])
        elif kind == "broken":
            urls, said = [_url(self._broken(what[0]))], "?"
        elif kind == "host":
            urls, said = [f"http://{what}:{self._port}/a.png"], _NOT_CONNECTED
        elif kind == "many":
            urls, said = [_url(SERVED["jpeg"][0])] * 33, "one part too many"
        elif label == MESSAGE:
            # It has no names there; the part is none.
            urls, said, more = [None], "", {"uuid": "cat"}
        else:
            urls, said, more = [None], "not here any more", {"uuid": f"cat-{rng.randrange(10**9)}"}
        if kind != "many" and rng.random() < 0.5:
            urls.insert(rng.randrange(2), _url(SERVED[rng.choice(list(SERVED))][0]))
        body = _turn(label, urls, more, tool=rng.random() < 0.3)
        body["stream"] = rng.random() < 0.5
        case: Case = self._operations[label].Case(body=body, media_type=JSON)
        self._made.append(case)
        self.expected[id(case)] = said
        return case

    def _broken(self, data: bytes) -> bytes:
        """The same image, with some bytes changed, or cut."""
        own = bytearray(data)
        for _ in range(self._rng.randrange(1, 8)):
            own[self._rng.randrange(len(own))] = self._rng.randrange(256)
        return bytes(own[: self._rng.randrange(len(own))] if self._rng.random() < 0.3 else own)

    def judge(self, case: Case, response: Response) -> None:
        """Raise `Wrong` for an answer that is not what was to become of a turn."""
        said, status = self.expected[id(case)], response.status_code
        if said == "?" and status == 200:
            return
        if said is None:
            if status != 200:
                raise Wrong(f"{status}, not served: {response.text[:300]}")
            return
        if status != 400:
            raise Wrong(f"{status}, and not 400: {response.text[:300]}")
        message = json.loads(response.content)["error"]["message"]
        if said != "?" and not (re.search(said, message) and _PART.search(message)):
            raise Wrong(f"it does not say {said!r} of a part: {message[:300]}")
        if shown := _SHOWS.search(message):
            raise Wrong(f"it shows {shown[0]!r}: {message[:300]}")


def _turn(label: str, urls: list[Any], more: dict[str, Any], *, tool: bool) -> dict[str, Any]:
    text = {"type": "input_text" if label == RESPONSE else "text", "text": "what is it?"}
    parts = [text, *(_part(label, url, {} if url else more) for url in urls)]
    if label == RESPONSE:
        said: list[Any] = [{"role": "user", "content": parts}]
        if tool:
            said = [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": parts},
            ]
        return {"input": said, "max_output_tokens": 4}
    said = [{"role": "user", "content": parts}]
    if tool and label == MESSAGE:
        use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
        said = [{"role": "user", "content": "look"}, {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]}]  # fmt: skip
    elif tool:
        called = {"name": "look", "arguments": "{}"}
        calls = [{"id": "c", "type": "function", "function": called}]
        said = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": parts},
        ]
    return {"messages": said, "max_tokens": 4}


def _part(label: str, url: Any, more: dict[str, Any]) -> dict[str, Any]:
    if label == CHAT:
        return {"type": "image_url", "image_url": None if url is None else {"url": url}, **more}
    if label == RESPONSE:
        return {"type": "input_image", "image_url": url, **more}
    if isinstance(url, str) and url.startswith("data:") and "base64," in url:
        media_type, _, data = url.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": media_type, "data": data}
        return {"type": "image", "source": source, **more}
    return {"type": "image", "source": {"type": "url", "url": url}, **more}


@pytest.mark.timeout(1800)
def test_no_image_takes_anything_down_or_shows_the_server(
    application: str, request: pytest.FixtureRequest
) -> None:
    asked, seed = (request.config.getoption(f"--fuzz-{name}") for name in ("cases", "seed"))
    document = httpx.get(application + "/openapi.json", timeout=60).json()
    before = {engine["id"]: engine["pid"] for engine in engines()}
    with _watched_port() as (port, connected):
        cases = _Cases(document, port, seed)
        drawn = cases.drawn(max(_LEAST, asked // _ONE_IN))
        report = try_all(
            application, drawn, seed, clients=4, patience_s=_PATIENCE_S, also=cases.judge
        )
    logger.info("%s", report)
    assert not report.findings, str(report)
    assert connected == []
    assert metric("conserve_engines_lost_total") == 0
    assert {engine["id"]: engine["pid"] for engine in engines()} == before
    assert all(psutil.pid_exists(pid) for pid in before.values())
    assert {"200", "400", "left"} <= set(report.outcomes), report.outcomes
