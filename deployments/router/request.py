"""Reading a turn's request: what it says, whose it is, and what is wrong with it."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from conserve import budget, identity, recognition
from conserve.errors import ApiError, unknown_model
from conserve.hints import Hints, InvalidHint, hints
from conserve.numbers import beyond_64_bits
from conserve.recognition import Chain
from conserve.settings import Settings
from deployments.messages import TurnTenant
from deployments.router.access import caller_of
from deployments.router.salt import own_media, salted

CHAT = "/v1/chat/completions"

Understood = TypeVar("Understood")

_BODY_TIMEOUT_S = 120.0
# What is longer is understood in a thread, one at a time: everybody's tokens pass through this one.
_SMALL_BYTES = 16 * 1024
_READER = ThreadPoolExecutor(1, "reader")
# What is longer than this comes in no faster: 8 MiB in half a second.
_UNPACED_BYTES = 256 * 1024
_PACE_BYTES_S = 16 * 1024 * 1024
# The table gets so many digests to recognise a history by: those of the newest answers.
_MOST_CANDIDATES = 64
_SPACE = re.compile(r"[ \t\n\r]*")
# A client does not direct the handoff; the router does.
_NOT_FORWARDED = ("kv_transfer_params",)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A turn as its client asked for it.

    Attributes:
        raw: the body as engines get it; ``body`` is the same, parsed.
        explicit_id: the conversation's id, scoped to its tenant, if the request names it.
        chain: digests by which its history is recognised; None for a completion.
        one_off: whether it is a completion without an id: a conversation of this one turn.
        final: whether the client says that it is the conversation's last turn.
        hints: what its client says of it beside its messages.
        tenant: whose it is, where there are keys.
    """

    path: str
    raw: bytes
    body: dict[str, Any]
    explicit_id: str | None
    chain: Chain | None
    one_off: bool
    final: bool
    request_id: str | None
    hints: Hints
    tenant: TurnTenant | None = None

    @property
    def chat(self) -> bool:
        """Whether it is a chat, and no bare completion."""
        return self.path == CHAT

    @property
    def one_stream(self) -> bool:
        """Whether its answer is a stream, and a single one."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        return self.body.get("stream") is True and (self.chat or not several)

    @property
    def model(self) -> str:
        """The name by which it asks for the model."""
        return str(self.body["model"])


async def read_request(scope: Scope, receive: Receive, settings: Settings) -> ClientRequest | None:
    """Read a request to its end; None if the client leaves while it sends.

    Raises:
        ApiError: it is not one that can be served; the error says why.
    """
    headers = Headers(scope=scope)
    raw = await read_body(headers, receive, settings.max_body_bytes)
    if raw is None:
        return None
    return await understood(raw, partial(_understood, scope, headers, settings=settings))


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes | None:
    """Read a body to its end; None if the client leaves while it sends.

    Args:
        limit: bytes that it may have.

    Raises:
        ApiError: 413, it is longer; 408, it is not whole in time.
    """
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await _body(headers, receive, limit)
    except TimeoutError:
        raise ApiError(
            408, f"the request was not whole after {_BODY_TIMEOUT_S:g} s", "timeout"
        ) from None


async def understood(raw: bytes, understand: Callable[[bytes], Understood]) -> Understood:
    """What a body is understood as: in a thread, where it is long.

    Args:
        understand: may raise ApiError.
    """
    if len(raw) <= _SMALL_BYTES:
        return understand(raw)
    return await asyncio.get_running_loop().run_in_executor(_READER, understand, raw)


def read_json(raw: bytes, chat: bool) -> dict[str, Any]:
    """Parse a body, unless it holds too much to be parsed.

    Args:
        chat: whether it is a chat, and may not hold token ids.

    Raises:
        ApiError: 400.
    """
    if json.detect_encoding(raw) not in ("utf-8", "utf-8-sig"):
        raise ApiError(400, "the body must be JSON in UTF-8")
    budget.check_raw(raw, chat)
    return _parsed(raw)


def named_model(body: Mapping[str, Any], settings: Settings) -> str:
    """The model that a body asks for, which is the one that is served.

    Raises:
        ApiError: 400 or 404, it is another.
    """
    model = body.get("model", settings.model_id)
    if not isinstance(model, str):
        raise ApiError(400, "model must be a string", param="model")
    if model != settings.model_id:
        raise unknown_model(model, settings.model_id)
    return model


def _understood(scope: Scope, headers: Headers, raw: bytes, settings: Settings) -> ClientRequest:
    path, caller = scope["path"], caller_of(scope)
    tenant = None if caller is None else caller.tenant
    chat = path == CHAT
    body = read_json(raw, chat)
    model = named_model(body, settings)
    budget.check(body, chat)
    large = beyond_64_bits(body)
    if large is not None:
        raise ApiError(400, f"{large} has a number that takes more than 64 bits", param=large)
    try:
        explicit_id = identity.explicit_id(headers, body)
    except identity.InvalidConversationId as error:
        raise ApiError(400, str(error), "invalid_conversation_id", param=error.source) from None
    try:
        said = hints(headers, body)
    except InvalidHint as error:
        raise ApiError(400, str(error), "invalid_hint", param=error.source) from None
    own = identity.without_identity(body)
    for name in _NOT_FORWARDED:
        own.pop(name, None)
    # The other way into the engine's arguments.
    extra = own.get("vllm_xargs")
    if isinstance(extra, dict) and any(name in extra for name in _NOT_FORWARDED):
        own["vllm_xargs"] = {k: v for k, v in extra.items() if k not in _NOT_FORWARDED}
    if "model" not in own:
        own["model"] = model
    if caller is not None and chat:
        own["messages"] = own_media(body["messages"], caller.cache_salt)
    if own != body:
        raw = _changed(raw, body, own)
    raw, own = salted(raw, own, None if caller is None else caller.cache_salt)
    stated_id = explicit_id or (None if chat else identity.new_id())
    return ClientRequest(
        path=path,
        raw=raw,
        body=own,
        explicit_id=None if stated_id is None else identity.scoped(tenant, stated_id),
        chain=(
            recognition.chain_of(own["messages"], own.get("tools"), tenant, _MOST_CANDIDATES)
            if chat
            else None
        ),
        one_off=explicit_id is None and not chat,
        final=identity.is_final(headers),
        request_id=_request_id(headers),
        hints=said,
        tenant=None if caller is None else TurnTenant(caller.tenant, caller.limits),
    )


async def _body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes | None:
    announced = headers.get("content-length", "0")
    too_long = ApiError(413, f"the body is longer than {limit} bytes", "body_too_long")
    if announced.isdigit() and int(announced) > limit:
        raise too_long
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > limit:
            raise too_long
        if not message.get("more_body"):
            return b"".join(parts)
        if length > _UNPACED_BYTES:
            await asyncio.sleep(len(parts[-1]) / _PACE_BYTES_S)


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _changed(raw: bytes, body: dict[str, Any], own: dict[str, Any]) -> bytes:
    """The JSON of ``own``; what it shares with ``body`` as it stands in that one's JSON.

    To write the strings of 8 MiB anew takes 170 ms, and Python does it in one go.
    """
    sources = _sources(raw)
    members = (
        f"{json.dumps(name)}:"
        + (sources[name] if name in body and value is body[name] else json.dumps(value))
        for name, value in own.items()
    )
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")


def _sources(raw: bytes) -> dict[str, str]:
    """The text of each member of a JSON object, which is known to be one."""
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    decode = json.JSONDecoder().raw_decode
    found = {}
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)
        _, end = decode(text, at)
        found[name] = text[at:end]
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _request_id(headers: Mapping[str, str]) -> str | None:
    value = headers.get("x-request-id", "")
    return value if 0 < len(value) <= 128 and value.isascii() and value.isprintable() else None
