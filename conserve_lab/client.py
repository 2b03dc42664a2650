"""One endpoint: sends a turn, reads its stream, ends a conversation."""

import asyncio
import io
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from conserve_lab import counters
from conserve_lab.records import Answer, TurnRecord, TurnRequest
from conserve_lab.sse import AnswerStream, error_message

_RELEASE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
# Below the five seconds after which common servers close an idle connection: a request sent on one
# that is just being closed would fail, and that would not be the system's failure.
_KEEPALIVE_S = 2.0
# aiohttp writes longer bodies in one go, and warns of it.
_ONE_WRITE_BYTES = 512 * 1024
_ERROR_BODY_BYTES = 64 * 1024
_READ_BUFFER_BYTES = 1024 * 1024
# vLLM's reasons for an answer that the engine gave up; the stream ends as others do.
_GIVEN_UP = ("abort", "error")


class EndpointError(RuntimeError):
    """The endpoint cannot be measured at all; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A system to measure.

    Attributes:
        system: its name in the records.
        url: without a path.
        model: put into every request that names none; None: `with_model` asks for it.
        conversation_headers: request headers that carry the conversation's id.
        server_header: response header that names the replica.
        release: whether the end of a conversation is told, by ``DELETE /v1/conversations/{id}``.
        min_tokens: whether output lengths are forced with ``min_tokens`` too, beside ``max_tokens``
            and ``ignore_eos``.
    """

    system: str
    url: str
    model: str | None = None
    conversation_headers: tuple[str, ...] = ("X-Conversation-Id",)
    server_header: str = "x-conserve-decoder"
    headers: Mapping[str, str] = field(default_factory=dict)
    release: bool = True
    min_tokens: bool = True

    @property
    def is_here(self) -> bool:
        """Whether the endpoint is on this machine, as far as its address tells."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


async def with_model(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with the first model that it lists, unless one is named, or
    EndpointError.
    """
    if endpoint.model is not None:
        return endpoint
    base = endpoint.url.rstrip("/")
    try:
        async with (
            asyncio.timeout(_CONNECT_TIMEOUT_S),
            aiohttp.ClientSession(headers=endpoint.headers) as session,
            session.get(f"{base}/v1/models") as response,
        ):
            if response.status != 200:
                raise EndpointError(
                    f"{base}/v1/models answered {await _refusal(response)}; "
                    "name the model to ask for"
                )
            raw = await response.read()
        return replace(endpoint, model=str(msgspec.json.decode(raw)["data"][0]["id"]))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EndpointError(f"nothing answers at {base}: {_said(error)}") from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise EndpointError(f"{base}/v1/models lists no model; name the model to ask for") from None


class Client:
    """A connection pool to an endpoint whose model is known; ``now`` is the run's clock."""

    def __init__(
        self,
        endpoint: Endpoint,
        now: Callable[[], float],
        turn_timeout_s: float,
        cache_salt: str | None,
        id_prefix: str,
    ) -> None:
        self._endpoint = endpoint
        self._url = endpoint.url.rstrip("/")
        self._now = now
        self._turn_timeout_s = turn_timeout_s
        self._id_prefix = id_prefix
        self._defaults = {"model": endpoint.model}
        if cache_salt is not None:
            self._defaults["cache_salt"] = cache_salt

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._endpoint.headers,
            read_bufsize=_READ_BUFFER_BYTES,
        )
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._session.close()

    def encode(self, request: TurnRequest) -> bytes:
        """Return the request's JSON body, with the model and the cache salt where it names none."""
        body = {**self._defaults, **request.body()}
        if not self._endpoint.min_tokens:
            body.pop("min_tokens", None)
        return msgspec.json.encode(body)

    async def turn(self, request: TurnRequest, body: bytes, record: TurnRecord) -> Answer | None:
        """Send a turn, and write down in ``record`` what was seen; returns an answer if it
        completed.
        """
        stream = AnswerStream()
        record.sent_s = self._now()
        try:
            async with asyncio.timeout(self._turn_timeout_s):
                record.error = await self._stream(request.path, body, stream, record)
            record.outcome = "failed" if record.error else "completed"
        except TimeoutError:
            record.outcome = "timeout"
            record.error = f"timeout: no whole answer within {self._turn_timeout_s:g} s"
        except asyncio.CancelledError:
            record.outcome = "unfinished"
            raise
        finally:
            record.ended_s = self._now()
            _write_down(stream, request, record)
        return stream.answer if record.outcome == "completed" else None

    async def _stream(
        self, path: str, body: bytes, stream: AnswerStream, record: TurnRecord
    ) -> str | None:
        """Read the stream; returns what went wrong, as ``kind: what was said``, or None."""
        conversation = self._id_prefix + record.conversation
        headers = dict.fromkeys(self._endpoint.conversation_headers, conversation)
        headers["Content-Type"] = "application/json"
        data = body if len(body) <= _ONE_WRITE_BYTES else io.BytesIO(body)
        try:
            async with self._session.post(self._url + path, data=data, headers=headers) as response:
                record.server = response.headers.get(self._endpoint.server_header)
                if response.status != 200:
                    return await _refusal(response)
                async for part in response.content.iter_any():
                    stream.feed(part, self._now())
        except aiohttp.ClientPayloadError as error:
            return f"broken stream: {_said(error)}"
        except (aiohttp.ClientError, OSError) as error:
            return f"connection: {_said(error)}"
        if stream.error is not None:
            return f"error event: {stream.error}"
        if not stream.done:
            return "broken stream: it ended without [DONE]"
        if stream.finish_reason in _GIVEN_UP:
            return f"given up: the server ended it with finish_reason {stream.finish_reason!r}"
        if stream.finish_reason is None and not stream.token_times_s:
            return "empty stream: it has neither output nor a finish_reason"
        return None

    async def release(self, conversation: str) -> bool:
        """Tell a conversation's end; returns whether the endpoint answered, whatever it said."""
        name = quote(self._id_prefix + conversation, safe="")
        try:
            async with (
                asyncio.timeout(_RELEASE_TIMEOUT_S),
                self._session.delete(f"{self._url}/v1/conversations/{name}"),
            ):
                return True
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def counters(self) -> dict[str, float] | None:
        """Return what the server has counted (`conserve_lab.counters`); None: it does not say."""
        try:
            async with (
                asyncio.timeout(_CONNECT_TIMEOUT_S),
                self._session.get(self._url + "/metrics") as response,
            ):
                if response.status != 200:
                    return None
                return counters.read(await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def _write_down(stream: AnswerStream, request: TurnRequest, record: TurnRecord) -> None:
    record.first_token_s = stream.first_token_s
    record.token_times_s = tuple(stream.token_times_s)
    record.prompt_tokens = stream.prompt_tokens or request.prompt_tokens or 0
    counted = stream.output_tokens
    record.output_tokens = len(stream.token_times_s) if counted is None else counted
    record.cached_tokens = stream.cached_tokens
    record.reused_tokens = request.reused_tokens
    if record.outcome == "completed":
        for_user = bool(stream.token_times_s) and not stream.answer.tool_calls
        record.effective = for_user if request.effective is None else request.effective


async def _refusal(response: aiohttp.ClientResponse) -> str:
    raw = await response.content.read(_ERROR_BODY_BYTES)
    try:
        body: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        body = raw.decode(errors="replace") or response.reason
    return f"HTTP {response.status}: {error_message(body)}"


def _said(error: BaseException) -> str:
    return error_message(str(error) or type(error).__name__)
