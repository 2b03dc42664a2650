"""Reading a turn's request: what it says, whose it is, and what is wrong with it."""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from conserve import apis, budget, identity, recognition, wire
from conserve.apis import COMPLETIONS, DETOKENIZE, RESPONSES
from conserve.budget import beyond_64_bits
from conserve.canonical_items import canonical, unserved_tools
from conserve.errors import ApiError, unknown_model
from conserve.hints import Hints, InvalidHint, hints
from conserve.recognition import Chain
from conserve.recognition.apis import continues, heard
from conserve.recognition.volatile import without_billing_header
from conserve.served import as_served, resolved
from conserve.settings import Settings
from deployments.messages import TurnTenant
from deployments.router.access import caller_of
from deployments.router.reading import understood, whole_characters
from deployments.router.salt import own_media, salted, with_member
from deployments.router.stored import PREVIOUS, StoredResponses

_BODY_TIMEOUT_S = 120.0
# What is longer than this comes in no faster: 8 MiB in half a second.
_UNPACED_BYTES = 256 * 1024
_PACE_BYTES_S = 16 * 1024 * 1024
# The table gets so many digests to recognise a history by: those of the newest answers.
_MOST_CANDIDATES = 64
_SPACE = re.compile(r"[ \t\n\r]*")
# What clients ask for at most where nobody has told them how much there is: they send it to models
# with a small context, too. By the beginning of their `User-Agent`. Claude Code's are by model
# (https://github.com/anthropics/claude-code/issues/35133), opencode's is its OUTPUT_TOKEN_MAX.
_DEFAULT_CAPS = {
    "claude-cli/": (32_000, 64_000),
    "claude-code/": (32_000, 64_000),
    "opencode/": (32_000,),
}
# What a request of the Responses API may ask for of OpenAI's servers, and what to do here.
_UNSERVED = {
    "background": "a turn ends with its client's connection; stream it instead",
    "conversation": "go on by previous_response_id, or send the whole history",
    "context_management": "no history is shortened here; send what is left of it",
    "prompt": "no templates are kept here; send instructions and input",
    "moderation": "nobody judges here what is said; leave it out",
}
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
        takes_room_left: whether it asks for more output than it needs, so that what there is room
            for will do.
        unserved_tools: kinds of tools that it offers, and that the model is not shown.
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
    takes_room_left: bool = False
    unserved_tools: tuple[str, ...] = ()

    @property
    def chat(self) -> bool:
        """Whether it has messages, and is no bare completion."""
        return apis.is_dialogue(self.path)

    @property
    def one_stream(self) -> bool:
        """Whether its answer is a stream, and a single one."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        return self.body.get("stream") is True and (self.path != COMPLETIONS or not several)

    @property
    def engine_path(self) -> str:
        """Its path on engines, where they judge it or serve it."""
        return self.path + wire.ROOM_LEFT if self.takes_room_left else self.path

    @property
    def model(self) -> str:
        """The name by which it asks for the model."""
        return str(self.body["model"])


async def read_request(
    scope: Scope, receive: Receive, settings: Settings, stored: StoredResponses | None = None
) -> ClientRequest | None:
    """Read a request to its end; None if the client leaves while it sends.

    Args:
        stored: finds the history of a turn that names a response; None where none can.

    Raises:
        ApiError: it is not one that can be served; the error says why.
    """
    headers = Headers(scope=scope)
    raw = await read_body(headers, receive, settings.max_body_bytes)
    if raw is None:
        return None
    goes_on: str | None = None
    if scope["path"] == RESPONSES and stored is not None:
        caller = caller_of(scope)
        raw, goes_on = await stored.with_history(raw, None if caller is None else caller.tenant)
    return await understood(len(raw), _understood, scope, headers, raw, settings, goes_on)


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


def read_json(raw: bytes, path: str, settings: Settings) -> dict[str, Any]:
    """Parse a body, unless it holds too much to be parsed, or asks for another model.

    Args:
        path: of a completion it may hold token ids.

    Raises:
        ApiError: 400 or 404.
    """
    if json.detect_encoding(raw) not in ("utf-8", "utf-8-sig"):
        raise ApiError(400, "the body must be JSON in UTF-8")
    budget.check_raw(raw, path not in (COMPLETIONS, DETOKENIZE))
    body = _parsed(raw)
    model = body.get("model")
    if model is None:
        model = settings.model_id
    if not isinstance(model, str):
        raise ApiError(400, "model must be a string", param="model")
    if model != settings.model_id:
        raise unknown_model(model, settings.model_id)
    large = beyond_64_bits(body)
    if large is not None:
        raise ApiError(
            400, f"{large} has a number that takes more than 64 bits; send a smaller", param=large
        )
    return body


def checked_body(raw: bytes, path: str, settings: Settings) -> dict[str, Any]:
    """A turn's body parsed, of a size and a kind that can be passed on.

    Raises:
        ApiError: it is not.
    """
    body = read_json(raw, path, settings)
    budget.check(resolved(path, body), path)
    return body


def _understood(
    scope: Scope, headers: Headers, raw: bytes, settings: Settings, goes_on: str | None
) -> ClientRequest:
    path, caller = scope["path"], caller_of(scope)
    tenant = None if caller is None else caller.tenant
    chat = apis.is_dialogue(path)
    raw = whole_characters(raw)
    body = checked_body(raw, path, settings)
    if path == RESPONSES:
        _require_served(body)
        if body.get(PREVIOUS) is not None:
            # It was looked for as it is written.
            raise ApiError(400, f"write {PREVIOUS} without escapes", param=PREVIOUS)
    try:
        explicit_id = identity.explicit_id(headers, body)
    except identity.InvalidConversationId as error:
        raise ApiError(400, str(error), "invalid_conversation_id", param=error.source) from None
    try:
        said = hints(headers, body)
    except InvalidHint as error:
        raise ApiError(400, str(error), "invalid_hint", param=error.source) from None
    own = as_served(identity.without_identity(resolved(path, body)), path)
    for name in _NOT_FORWARDED:
        own.pop(name, None)
    # The other way into the engine's arguments.
    extra = own.get("vllm_xargs")
    if isinstance(extra, dict) and any(name in extra for name in _NOT_FORWARDED):
        own["vllm_xargs"] = {k: v for k, v in extra.items() if k not in _NOT_FORWARDED}
    if path == RESPONSES:
        own.pop("request_id", None)
        own = canonical(own)
    if own.get("model") is None:
        own["model"] = settings.model_id
    if caller is not None:
        for name in ("messages", "input"):
            if name in own:
                own[name] = own_media(own[name], caller.cache_salt)
    if "billing_header" in settings.volatile_text:
        own = without_billing_header(path, own)
    raw = changed_body(raw, body, own)
    if path == RESPONSES:
        # So that it is the same one, whichever decoder goes on with it.
        raw, own = with_member(raw, own, "request_id", f"resp_{secrets.token_hex(16)}")
    raw, own = salted(raw, own, None if caller is None else caller.cache_salt)
    if explicit_id is not None:
        stated_id: str | None = identity.scoped(tenant, explicit_id)
    elif not chat:
        stated_id = identity.scoped(tenant, identity.new_id())
    else:
        stated_id = goes_on
    return ClientRequest(
        path=path,
        raw=raw,
        body=own,
        explicit_id=stated_id,
        chain=(
            recognition.chain_of(
                *heard(path, own, settings.volatile_text),
                tenant,
                _MOST_CANDIDATES,
                continues(path, own),
            )
            if chat
            else None
        ),
        one_off=explicit_id is None and not chat,
        final=identity.is_final(headers),
        request_id=_request_id(headers),
        hints=said,
        tenant=None if caller is None else TurnTenant(caller.tenant, caller.limits),
        takes_room_left=_asks_by_default(headers, body),
        unserved_tools=unserved_tools(body) if path == RESPONSES else (),
    )


def _asks_by_default(headers: Mapping[str, str], body: Mapping[str, Any]) -> bool:
    """Whether the output that is asked for at most is a known client's default."""
    client = headers.get("user-agent", "")
    caps = [caps for begins, caps in _DEFAULT_CAPS.items() if client.startswith(begins)]
    return bool(caps) and any(body.get(name) in caps[0] for name in apis.OUTPUT_CAPS)


def _require_served(body: Mapping[str, Any]) -> None:
    """Refuse what would need a server that keeps more of a client's than its responses."""
    for name, instead in _UNSERVED.items():
        if body.get(name):
            raise ApiError(400, f"{name} is not served: {instead}", "unsupported_value", param=name)


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


def changed_body(raw: bytes, body: dict[str, Any], own: dict[str, Any]) -> bytes:
    """The JSON of ``own``; what it shares with ``body`` as it stands in that one's JSON, ``raw``.

    To write the strings of 8 MiB anew takes 170 ms, and Python does it in one go.
    """
    if own == body:
        return raw
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
