"""What is known of an engine whose connection fails."""

from collections.abc import AsyncIterator

import pytest

from conserve.errors import ApiError
from conserve.turn import TurnStats
from deployments.messages import Checked
from deployments.router.upstream import EngineUnreachable, Upstream
from tests.unit.deployments.router.fakes import answering


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    one = Upstream(silence_s=5)
    yield one
    await one._open().close()


async def failure(upstream: Upstream, url: str) -> EngineUnreachable:
    with pytest.raises(EngineUnreachable) as error:
        await upstream.answered(url, b"{}")
    return error.value


async def test_an_engine_that_cannot_be_connected_to_never_had_the_request(
    upstream: Upstream,
) -> None:
    async with answering(b"") as url:
        pass
    assert not (await failure(upstream, url)).had_request


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"], ids=["none", "half"]
)
async def test_an_engine_that_is_gone_in_between_may_have_had_it(
    upstream: Upstream, answer: bytes
) -> None:
    async with answering(answer) as url:
        assert (await failure(upstream, url)).had_request


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (200, b'{"prompts": [[1, 2], [3]], "multimodal": true, "encode_tokens": 7}', None),
        (400, b'{"error": {"message": "n must be at least 1", "param": "n"}}', (400, "n must be")),
        (404, b'{"error": {"message": "Not Found"}}', (502, "cannot check requests")),
    ],
)
async def test_an_engine_judges_a_turn(
    upstream: Upstream, status: int, body: bytes, refused: tuple[int, str] | None
) -> None:
    asked: list[bytes] = []
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    async with answering(f"{head}\r\n\r\n".encode() + body, asked) as url:
        if refused is None:
            checked = await upstream.check(url, "/v1/completions", b"{}")
            assert checked == Checked([[1, 2], [3]], multimodal=True, encode_tokens=7)
        else:
            with pytest.raises(ApiError, match=refused[1]) as error:
                await upstream.check(url, "/v1/completions", b"{}")
            assert error.value.status == refused[0]
    assert asked[0].startswith(b"POST /conserve/check/v1/completions ")


async def test_a_prefiller_says_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(self: Upstream, url: str, raw: bytes) -> bytes:
        assert (url, raw) == ("http://p/conserve/prefill/v1/messages", b"{body}")
        return b'{"prefilled_tokens": 3, "prefiller_cached_tokens": 2}'

    monkeypatch.setattr(Upstream, "answered", answered)
    done = await Upstream(5).prefill("http://p", "/v1/messages", b"{body}")
    assert done == TurnStats(prefilled_tokens=3, prefiller_cached_tokens=2)
