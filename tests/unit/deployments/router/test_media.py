"""Media of requests: named, limited, kept, and fetched from public addresses alone."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.errors import ApiError
from conserve.media import Lifted, name_of, places
from conserve.settings import MediaSettings, Settings
from deployments.router import media as module
from deployments.router.media import (
    FetchBudget,
    MediaReader,
    NotFetched,
    PublicResolver,
    fetched,
    is_public,
)
from tests.unit.deployments.asgi import a_reader
from tests.unit.deployments.router.images import data_url, png

HOST = "images.example"


def chat(*urls: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}} | more for url in urls]
    return {"messages": [{"role": "user", "content": content}]}


def named(
    reader: MediaReader, body: dict[str, Any], salt: str | None = None, path: str = CHAT
) -> list[str]:
    """The names that engines get."""
    lifted = Lifted(json.dumps(body).encode())
    own = reader.named(json.loads(lifted.raw), path, lifted, salt)
    return [name_of(place.url) or "" for place in places(own, path)]


def refusal(reader: MediaReader, body: dict[str, Any], salt: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as refused:
        named(reader, body, salt)
    assert refused.value.status == 400
    return refused.value


@pytest.fixture
def reader() -> MediaReader:
    return a_reader(Settings(allowed_media_domains=[HOST]))


def test_an_image_has_one_name_by_every_api_and_every_encoding(reader: MediaReader) -> None:
    large = png(size=200) + b"\0" * 40_000  # Long enough to be lifted.
    text = base64.b64encode(large).decode()
    source = {"type": "base64", "media_type": "image/png", "data": text}
    block = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    item = {"type": "input_image", "image_url": data_url(large)}
    names = {
        *named(reader, chat(data_url(large), data_url(large))),
        *named(reader, chat(f"data:image/jpeg;charset=x;base64,{text}")),
        *named(reader, block, path=MESSAGES),
        *named(reader, {"input": [{"role": "user", "content": [item]}]}, path=RESPONSES),
    }
    assert len(names) == 1
    others = {
        *named(reader, chat(data_url(large)), "a"),
        *named(reader, chat(data_url(large)), "b"),
    }
    assert len(names | others) == 3
    # What another says it is called does not matter.
    forged = min(names)
    assert named(reader, chat(f"data:image/png;conserve={forged};base64,"
                              f"{base64.b64encode(png(5)).decode()}")) != [forged]  # fmt: skip


def test_limits_name_the_part_that_is_too_much() -> None:
    one = png()
    limits = MediaSettings(parts=2, bytes=2 * len(one), pixels=100)
    reader = a_reader(Settings(media=limits))
    assert len(named(reader, chat(*[data_url(one)] * 2))) == 2
    error = refusal(reader, chat(*[data_url(one)] * 3))
    assert error.param == "messages[0].content[2]"
    assert "a request may have 2" in str(error)
    error = refusal(reader, chat(data_url(one), data_url(one + b"\0")))
    assert error.param == "messages[0].content[1]"
    assert "longer than" in str(error)
    error = refusal(reader, chat(data_url(png(size=11))))
    assert "more than 100 pixels (11 x 11)" in str(error)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (None, "must have a URL"),
        ("file:///etc/passwd", "must have a data:, http: or https: URL"),
        ("data:image/png;base64,bm8=", "no image that can be read"),
    ],
)
def test_other_urls_are_refused(reader: MediaReader, url: Any, said: str) -> None:
    error = refusal(reader, chat(url))
    assert error.param == "messages[0].content[0]"
    assert said in str(error)


def test_a_tenant_may_name_what_it_has_sent_and_nothing_else(reader: MediaReader) -> None:
    names = named(reader, chat(data_url(png()), uuid="cat"), "a")
    assert named(reader, chat(None, uuid="cat"), "a") == names
    assert "not here any more" in str(refusal(reader, chat(None, uuid="cat"), "b"))
    assert "not here any more" in str(refusal(reader, chat(None, uuid=names[0]), "b"))
    for uuid in ("x" * 257, 5, ["cat"], {}):
        assert "a uuid of at most" in str(refusal(reader, chat(data_url(png()), uuid=uuid), "a"))


def test_new_images_of_a_request_are_bounded_together() -> None:
    reader = a_reader(Settings(media=MediaSettings(pixels=64)))
    images = [data_url(png(colour)) for colour in range(9)]
    with pytest.raises(ApiError, match="larger than 512 pixels") as refused:
        named(reader, chat(*images))
    assert (refused.value.status, refused.value.param) == (503, "messages[0].content[8]")
    # The others are known by now.
    assert len(named(reader, chat(*images))) == 9


def test_the_same_bytes_as_another_kind_have_another_name(reader: MediaReader) -> None:
    (image,) = named(reader, chat(data_url(png())))
    part = {"type": "video_url", "video_url": {"url": data_url(png())}}
    (video,) = named(reader, {"messages": [{"role": "user", "content": [part]}]})
    assert image != video


# --- By URL ---------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stands for this machine, whose address counts as public."""

    async def resolved(loop: Any, host: str, port: int, **more: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.1")


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Serve; gives the URL of an image."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://{HOST}:{runner.addresses[0][1]}/1.png"
    finally:
        await runner.cleanup()


async def fetch(url: str, host: str = HOST) -> bytes:
    return await fetched(url, "messages[0].content[0]", [host], FetchBudget(10_000))


@pytest.mark.usefixtures("loopback_is_public")
async def test_an_image_is_fetched_once_and_is_the_same_as_in_the_request(
    reader: MediaReader,
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.host)
        return web.Response(body=png())

    async with serving(answer) as url:
        with pytest.raises(NotFetched) as missing:
            named(reader, chat(url, url, data_url(png(3))), "a")
        assert missing.value.urls == {url: "messages[0].content[0]"}
        await reader.fetch(missing.value, "a")
        found = named(reader, chat(url, url), "a")
        # What is here goes along, since it may be dropped while others are fetched.
        with pytest.raises(NotFetched) as missing:
            named(reader, chat(url, f"{url}2"), "a")
        assert (*missing.value.urls, *missing.value.kept) == (f"{url}2", url)
        # Another tenant fetches for itself: by the time it takes it would know.
        with pytest.raises(NotFetched):
            named(reader, chat(url), "b")
    assert set(found) == set(named(reader, chat(data_url(png())), "a"))
    assert len(asked) == 1
    assert asked[0].startswith(HOST)


@pytest.mark.usefixtures("loopback_is_public")
async def test_what_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1/")

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"\0" * 1000)

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"\0")
            await asyncio.sleep(0.01)

    for handler, within_s, said in (
        (redirect, 30.0, "its server answered 302"),
        (endless, 30.0, "longer than 10,000 bytes"),
        (slow, 0.3, "could not be fetched within 0.3 s"),
    ):
        monkeypatch.setattr(module, "_FETCH_S", within_s)
        async with serving(handler) as url:
            with pytest.raises(ApiError, match=said) as refused:
                await fetch(url)
        assert (refused.value.status, refused.value.param) == (400, "messages[0].content[0]")


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://localhost/", "http://2130706433/", "http://0x7f.1/",
     "http://017700000001/", "http://127.1/", "http://0/", "http://[::]/", "http://[::1]/",
     "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://[64:ff9b::7f00:1]/",
     "http://[fe80::1]/", "http://169.254.169.254/", "http://2852039166/", "http://10.0.0.1/"],
)  # fmt: skip
async def test_an_address_that_is_not_public_is_not_connected_to(url: str) -> None:
    """Even if its name is allowed."""
    with pytest.raises(ApiError, match=r"not public|no connection to its server"):
        await fetch(url, url.removeprefix("http://").removesuffix("/").strip("[]"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://other.example/1.png", "not among the server's allowed_media_domains"),
        (f"http://{HOST}.other.example/1.png", "not among the server's allowed_media_domains"),
        (f"http://{HOST}@other.example/", "not among the server's allowed_media_domains"),
        (f"http://user:word@{HOST}/", "has a user or a password"),
        (f"http://{HOST}:99999/", "has no valid URL"),
    ],
)
async def test_other_domains_are_refused(url: str, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        await fetch(url)


async def test_of_a_name_with_several_addresses_all_have_to_be_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name is resolved once, so the checked address is the one that is connected to."""
    asked: list[str] = []

    async def resolved(loop: Any, host: str, port: int, **more: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in ("1.1.1.1", "127.0.0.1")[: len(asked)]]  # fmt: skip

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)

    (found,) = await PublicResolver().resolve(HOST, 80)
    assert (found["host"], found["flags"]) == (
        "1.1.1.1", socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
    )  # fmt: skip
    with pytest.raises(module.NotPublic):
        await PublicResolver().resolve(HOST, 80)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.1.1.1", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("0.0.0.0", False),
        ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("100.64.0.1", False),
        ("169.254.169.254", False), ("224.0.0.1", False), ("::1", False), ("fe80::1", False),
        ("fd00::1", False), ("::ffff:10.0.0.1", False), ("::ffff:1.1.1.1", True),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("ff02::1", False), ("", False),
        ("fe80::1%lo", False), ("localhost", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
