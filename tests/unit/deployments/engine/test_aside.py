"""Media in long bodies are out of vLLM's way, and there where it decodes them."""

import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from conserve import wire
from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from conserve.media import Medium
from conserve.turn import TurnKey
from conserve.wire import Emitted
from deployments.engine import turns
from deployments.engine.turns import AsideConnector
from tests.unit.deployments.asgi import exchange
from tests.unit.deployments.engine.following import engine_turns


def _png(colour: str, side: int = 400) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG", compress_level=0)
    return file.getvalue()


RED, BLUE = _png("red"), _png("blue")


def _url(data: bytes) -> str:
    return Medium("f00", "image/png", base64.b64encode(data).decode()).url


def _body(path: str, *urls: str) -> Any:
    if path == COMPLETIONS:
        return {"prompt": " ".join(urls)}
    text: Any = {"type": "input_text" if path == RESPONSES else "text", "text": _url(RED)}
    parts = [text]
    for url in urls:
        if path == MESSAGES:
            parts.append({"type": "image", "source": {"type": "url", "url": url}})
        elif path == CHAT:
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "input_image", "image_url": url})
    return {"input" if path == RESPONSES else "messages": [{"role": "user", "content": parts}]}


def _urls(path: str, body: Any) -> list[str]:
    if path == COMPLETIONS:
        return []
    _, *parts = body["input" if path == RESPONSES else "messages"][0]["content"]
    if path == RESPONSES:
        return [part["image_url"] for part in parts]
    return [part["source" if path == MESSAGES else "image_url"]["url"] for part in parts]


def _seen(path: str, raw: bytes, headers: dict[str, str] | None = None) -> list[Any]:
    """Return the body that an engine's app gets, the colours of its images, and its turn."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got = (await receive())["body"]
        inner = scope["path"].removeprefix(wire.CHECK_PREFIX)
        connector = AsideConnector()
        colours = []
        for url in _urls(inner, json.loads(got[got.index(b"{") :])):
            image = await connector.fetch_image_async(url)
            colours.append(image.getpixel((0, 0)))
        seen.extend((got, colours, turns._current.get()))

    given = {"content-length": str(len(raw)), **(headers or {})}
    exchange(engine_turns(app), raw, path=path, headers=given)
    return seen


@pytest.mark.parametrize("prefix", ["", wire.CHECK_PREFIX])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_images_are_read_though_the_body_is_short(path: str, prefix: str) -> None:
    raw = json.dumps(_body(path, _url(RED), _url(BLUE), _url(RED))).encode()
    got, colours, _ = _seen(prefix + path, raw)
    assert colours == [(255, 0, 0), (0, 0, 255), (255, 0, 0)]
    # What is text stays text.
    assert got.count(b";base64,") == 4
    assert got.count(base64.b64encode(RED)) == 1
    assert len(got) < len(raw) / 2
    assert not turns._media


def test_other_bodies_stay_as_they_are() -> None:
    for path, raw in (
        (COMPLETIONS, json.dumps(_body(COMPLETIONS, _url(RED))).encode()),
        (CHAT, json.dumps(_body(CHAT, *[_url(_png("red", 8))] * 3)).encode()),
    ):
        assert _seen(path, raw)[0] == raw


def test_notes_of_a_stream_stay_as_they_are() -> None:
    emitted = Emitted([41], "stop", ";base64," + "A" * 20_000)
    notes = wire.note([emitted])
    raw = notes + json.dumps(_body(CHAT, _url(BLUE))).encode()
    told = wire.DecoderTurn(TurnKey("c", 1, 256), sent_bytes=len(notes)).header()
    got, colours, turn = _seen(CHAT, raw, {wire.TURN_HEADER: told})
    assert turn.sent == [emitted]
    assert got.startswith(b'{"messages"')
    assert colours == [(0, 0, 255)]
