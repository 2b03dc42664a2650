"""What is known of an engine whose connection fails."""

import asyncio

import pytest

from conserve.errors import ApiError
from deployments.messages import Checked, Prefilled
from deployments.router.upstream import EngineUnreachable, Upstream


async def _asked(url: str) -> EngineUnreachable:
    upstream = Upstream(silence_s=5)
    try:
        with pytest.raises(EngineUnreachable) as error:
            async with upstream.post(url, b"{}", {"Content-Type": "application/json"}) as response:
                await response.read()
        return error.value
    finally:
        await upstream._open().close()


async def test_an_engine_that_cannot_be_connected_to_never_had_the_request() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    assert not (await _asked(f"http://127.0.0.1:{port}/")).had_request


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"], ids=["none", "half"]
)
async def test_an_engine_that_is_gone_in_between_may_have_had_it(answer: bytes) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(die, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await _asked(f"http://127.0.0.1:{port}/")).had_request


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (200, b'{"prompts": [[1, 2], [3]], "multimodal": true, "encode_tokens": 7}', None),
        (400, b'{"error": {"message": "n must be at least 1", "param": "n"}}', (400, "n must be")),
        (404, b'{"error": {"message": "Not Found"}}', (502, "cannot check requests")),
    ],
)
def test_an_engine_judges_a_turn(status: int, body: bytes, refused: tuple[int, str] | None) -> None:
    asked: list[bytes] = []

    async def scenario() -> Checked:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"{body}"))
            head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            writer.close()

        upstream = Upstream(silence_s=5)
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            try:
                return await upstream.check(
                    f"http://127.0.0.1:{port}", "/v1/completions", b"{body}"
                )
            finally:
                await upstream._open().close()

    if refused is None:
        assert asyncio.run(scenario()) == Checked([[1, 2], [3]], multimodal=True, encode_tokens=7)
    else:
        with pytest.raises(ApiError, match=refused[1]) as error:
            asyncio.run(scenario())
        assert error.value.status == refused[0]
    assert asked[0].startswith(b"POST /conserve/check/v1/completions ")


def test_a_prefiller_says_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(self: Upstream, url: str, raw: bytes) -> bytes:
        assert (url, raw) == ("http://p/conserve/prefill/v1/messages", b"{body}")
        return b'{"prompt_tokens": 3, "lmcache_tokens": 0, "cached_tokens": 2}'

    monkeypatch.setattr(Upstream, "answered", answered)
    done = asyncio.run(Upstream(5).prefill("http://p", "/v1/messages", b"{body}"))
    assert done == Prefilled(3, 0, 2)
