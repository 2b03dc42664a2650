"""Turns with images by every API, and what their engines have encoded."""

import base64
import contextlib
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from conserve.apis import CHAT, MESSAGES, RESPONSES
from deployments.node.arena import Arena
from tests.engines.processes import processes

OUTPUT_TOKENS = 16


def new_image(rng: random.Random, pixels: int = 112) -> str:
    """An image like no other, as base64 of a PNG."""
    return png(Image.frombytes("RGB", (pixels, pixels), rng.randbytes(pixels * pixels * 3)))


def png(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def parts_of(path: str, *given: tuple[str, str]) -> list[dict[str, Any]]:
    """Return texts and images as parts of an API; each is its kind, and a text or base64."""
    made: list[dict[str, Any]] = []
    for kind, value in given:
        url = f"data:image/png;base64,{value}"
        if kind == "text":
            part = {"type": "input_text" if path == RESPONSES else "text", "text": value}
        elif path == CHAT:
            part = {"type": "image_url", "image_url": {"url": url}}
        elif path == MESSAGES:
            source = {"type": "base64", "media_type": "image/png", "data": value}
            part = {"type": "image", "source": source}
        else:
            part = {"type": "input_image", "image_url": url, "detail": "auto"}
        made.append(part)
    return made


def said(texts: tuple[str, str], image: str) -> list[dict[str, Any]]:
    """A text, an image and a text, as a chat's message has them."""
    before, behind = texts
    return parts_of(CHAT, ("text", before), ("image", image), ("text", behind))


def asking(path: str, messages: list[Any]) -> dict[str, Any]:
    """Return a greedy turn by any API."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    name = "input" if path == RESPONSES else "messages"
    common = {"model": "conserve-embedded", "temperature": 0, limit: OUTPUT_TOKENS}
    return {**common, name: messages}


def body_of(path: str, texts: tuple[str, str], image: str) -> dict[str, Any]:
    """A greedy turn of a text, an image and a text, by any API; without the last if it is empty."""
    before, behind = texts
    given = [("text", before), ("image", image), *([("text", behind)] if behind else [])]
    return asking(path, [user(parts_of(path, *given))])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer_of(path: str, body: Any) -> str:
    if path == CHAT:
        return str(body["choices"][0]["message"]["content"])
    if path == MESSAGES:
        return str(body["content"][0]["text"])
    return str(body["output"][0]["content"][0]["text"])


async def ask(
    client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any], *, stream: bool
) -> tuple[httpx.Headers, str, Any]:
    """An answer's headers, its text, and its body or the last of its events."""
    told: Any = None
    if not stream:
        reply = await client.post(url + path, json=body)
        assert reply.status_code == 200, reply.text
        told = reply.json()
        return reply.headers, answer_of(path, told), told
    parts = []
    async with client.stream("POST", url + path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                told = json.loads(line[6:])
                parts.append(_delta(path, told))
    return response.headers, "".join(parts), told


def _delta(path: str, event: Any) -> str:
    if path == CHAT:
        return "".join(one["delta"].get("content") or "" for one in event["choices"])
    if path == MESSAGES:
        own = event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
    else:
        own = event["delta"] if event["type"] == "response.output_text.delta" else ""
    return str(own)


def encoded() -> tuple[int, int]:
    """How many images the application's engines have encoded, and how many they have found."""
    files = (Path("/proc").glob(f"{process.pid}/fd/*") for process in processes("ray::"))
    for file in itertools.chain.from_iterable(files):
        with contextlib.suppress(OSError):
            if "memfd:conserve-encoded" in str(file.readlink()):
                return Arena(str(file)).counts()
    raise AssertionError("no arena")
