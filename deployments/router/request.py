"""Reading a turn's request: what it says, whose it is, and what is wrong with it."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from conserve import identity, recognition
from conserve.errors import ApiError, unknown_model
from conserve.recognition import Digest
from conserve.settings import Settings
from deployments.messages import TurnTenant
from deployments.router.access import caller_of
from deployments.router.salt import salted

CHAT = "/v1/chat/completions"

_BODY_TIMEOUT_S = 120.0
# A chat's messages may hold so many values in all: each is hashed, in the one thread that passes
# everybody's tokens on. Of 1.9 million, in 6 MB of "[],", the hashes took 4 s; of so many, 0.4 s.
_MOST_VALUES = 131_072
# The table gets so many digests to recognise a conversation by: those of the newest answers.
_MOST_CANDIDATES = 64
# What the tokenizer endpoint has to know of a chat request to render the prompt as the engine will.
_RENDERED = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
# A client does not direct the handoff; the router does.
_NOT_FORWARDED = ("kv_transfer_params",)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A turn as its client asked for it.

    Attributes:
        raw: the body as engines get it; ``body`` is the same, parsed.
        explicit_id: the conversation's id, scoped to its tenant, if the request names it.
        candidates: digests by which the conversation is recognised if not.
        one_off: whether it is a completion without an id: a conversation of this one turn.
        final: whether the client says that it is the conversation's last turn.
        tenant: whose it is, where there are keys.
    """

    path: str
    raw: bytes
    body: dict[str, Any]
    explicit_id: str | None
    candidates: list[Digest]
    one_off: bool
    final: bool
    request_id: str | None
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

    def tokenizer_body(self) -> dict[str, Any]:
        """The part of a chat that decides its prompt, as the tokenizer endpoint takes it."""
        rendered = {name: self.body[name] for name in ("model", *_RENDERED) if name in self.body}
        # vLLM hands these to the chat template, as arguments; that endpoint has no fields for them.
        extra = {
            name: self.body[name]
            for name in ("reasoning_effort", "documents")
            if self.body.get(name)
        }
        if extra.get("reasoning_effort") is not None:
            extra.setdefault("enable_thinking", extra["reasoning_effort"] != "none")
        if extra:
            given = self.body.get("chat_template_kwargs")
            more = given if isinstance(given, dict) else {}
            rendered["chat_template_kwargs"] = {**extra, **more}
        return rendered


async def read_request(scope: Scope, receive: Receive, settings: Settings) -> ClientRequest | None:
    """Read a request to its end; None if the client leaves while it sends.

    Raises:
        ApiError: it is not one that can be served; the error says why.
    """
    headers = Headers(scope=scope)
    caller = caller_of(scope)
    tenant = None if caller is None else caller.tenant
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            raw = await _body(headers, receive, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the request was not whole after {_BODY_TIMEOUT_S:g} s", "timeout"
        ) from None
    if raw is None:
        return None
    body = _parsed(raw)
    model = body.get("model", settings.model_id)
    if not isinstance(model, str):
        raise ApiError(400, "model must be a string", param="model")
    if model != settings.model_id:
        raise unknown_model(model, settings.model_id)
    chat = scope["path"] == CHAT
    if chat:
        _check_messages(body.get("messages"))
    elif not body.get("prompt"):
        raise ApiError(400, "prompt must not be empty", param="prompt")
    try:
        explicit_id = identity.explicit_id(headers, body)
    except identity.InvalidConversationId as error:
        raise ApiError(400, str(error), "invalid_conversation_id", param=error.source) from None
    own = {**identity.without_identity(body)}
    for name in _NOT_FORWARDED:
        own.pop(name, None)
    # The other way into the engine's arguments.
    extra = own.get("vllm_xargs")
    if isinstance(extra, dict) and any(name in extra for name in _NOT_FORWARDED):
        own["vllm_xargs"] = {k: v for k, v in extra.items() if k not in _NOT_FORWARDED}
    if "model" not in own:
        own["model"] = model
    if own != body:
        raw = json.dumps(own).encode()
    raw, own = salted(raw, own, None if caller is None else caller.cache_salt)
    stated_id = explicit_id or (None if chat else identity.new_id())
    return ClientRequest(
        path=scope["path"],
        raw=raw,
        body=own,
        explicit_id=None if stated_id is None else identity.scoped(tenant, stated_id),
        candidates=(
            recognition.candidate_digests(body["messages"], tenant)[:_MOST_CANDIDATES]
            if chat and explicit_id is None
            else []
        ),
        one_off=explicit_id is None and not chat,
        final=identity.is_final(headers),
        request_id=_request_id(headers),
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


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    if _holds_more_than(_MOST_VALUES, messages):
        raise ApiError(
            400,
            f"messages may hold {_MOST_VALUES} values in all, and these hold more; send fewer "
            "messages, or text instead of structure",
            param="messages",
        )
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(
                400, f"messages[{position}] must be an object with a role", param="messages"
            )
        if not isinstance(message.get("content"), str | list | None):
            raise ApiError(
                400,
                f"messages[{position}].content must be a string or a list of parts",
                param="messages",
            )


def _holds_more_than(limit: int, value: list[Any]) -> bool:
    """Whether there are more values than so many in a list, at whatever depth."""
    open_: list[Any] = [value]
    while open_:
        inner = open_.pop()
        limit -= len(inner)
        if limit < 0:
            return True
        values = inner.values() if isinstance(inner, dict) else inner
        open_.extend(one for one in values if isinstance(one, dict | list))
    return False


def _request_id(headers: Mapping[str, str]) -> str | None:
    value = headers.get("x-request-id", "")
    return value if 0 < len(value) <= 128 and value.isascii() and value.isprintable() else None
