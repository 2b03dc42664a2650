"""Reads a turn's request: what it says, whose it is, and what is wrong with it."""

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from conserve import apis, budget, identity, recognition, wire
from conserve.adapters import Adapter
from conserve.apis import COMPLETIONS, MESSAGES, RESPONSES
from conserve.canonical_items import canonical, unserved_tools
from conserve.errors import ApiError
from conserve.fields import ignored
from conserve.hints import Hints, InvalidHint, hints
from conserve.media import Lifted, places
from conserve.recognition import Chain
from conserve.recognition.apis import continues, heard
from conserve.recognition.normal import without_billing_header
from conserve.served import as_served, resolved
from conserve.settings import Settings
from deployments.messages import TurnTenant
from deployments.router.access import caller_of, models_of, tenant_of
from deployments.router.errors import request_id_of
from deployments.router.media import MediaReader, NotFetched
from deployments.router.reading import (
    changed_body,
    lifted_body,
    most_bytes,
    read_body,
    read_lifted,
    understood,
)
from deployments.router.stored import PREVIOUS, StoredResponses

# How many digests the table gets to recognise a history by: those of the newest answers.
_MOST_CANDIDATES = 64
# Output caps that clients send by default, to models with a small context, too; by the beginning of
# their `User-Agent`. Claude Code's depend on the model
# (https://github.com/anthropics/claude-code/issues/35133); opencode's is its OUTPUT_TOKEN_MAX.
_DEFAULT_CAPS = {
    "claude-cli/": (32_000, 64_000),
    "claude-code/": (32_000, 64_000),
    "opencode/": (32_000,),
}
# The first product of a `User-Agent` (https://www.rfc-editor.org/rfc/rfc9110#section-10.1.5).
_PRODUCT = re.compile(r"[\w!#$%&'*+.^`|~-]{1,40}", re.ASCII)
# A client does not direct the handoff; the router does.
_NOT_FORWARDED = ("kv_transfer_params", "ec_transfer_params")


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A turn as its client asked for it.

    Attributes:
        raw: the body as engines get it; ``body`` is the same, parsed, without the data of media.
        size: the length of ``raw`` in bytes, without the data of media.
        explicit_id: the conversation's id, scoped to its tenant, if the request names it.
        chain: digests by which its history is recognised; None for a completion.
        one_off: whether it is a completion without an id: a conversation of this one turn.
        final: whether the client says that it is the conversation's last turn.
        client: see `TurnStats`.
        digest: of the request to the byte, with its tenant, key and conversation.
        takes_room_left: whether less output than it asks for will do, if there is no room.
        no_output: whether it asks for its prompt's KV alone.
        unserved_tools: kinds of tools that it offers, and that the model is not shown.
        ignored_fields: names of fields that have no effect.
        media: how many images, or other parts with media, it has.
        to_encode: see `MediaReader.to_encode`; empty once encoders had it.
        adapter: of the model; None: it asks for the model itself.
    """

    path: str
    raw: bytes
    size: int
    body: dict[str, Any]
    explicit_id: str | None
    chain: Chain | None
    one_off: bool
    final: bool
    request_id: str | None
    hints: Hints
    client: str | None = None
    digest: bytes = b""
    tenant: TurnTenant | None = None
    takes_room_left: bool = False
    no_output: bool = False
    unserved_tools: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    media: int = 0
    to_encode: dict[str, bytes] = field(default_factory=dict)
    adapter: Adapter | None = None

    @property
    def chat(self) -> bool:
        """Whether it has messages, and is no bare completion."""
        return apis.is_dialogue(self.path)

    @property
    def streams(self) -> bool:
        """Whether its answer is a stream."""
        return self.body.get("stream") is True

    @property
    def one_stream(self) -> bool:
        """Whether its answer is a stream, and a single one."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
        return self.streams and (self.path != COMPLETIONS or not several)

    @property
    def engine_path(self) -> str:
        """The path on engines, which judge and serve it."""
        more = wire.ROOM_LEFT if self.takes_room_left else ""
        return self.path + (wire.NO_OUTPUT if self.no_output else more)

    @property
    def model(self) -> str:
        """The model as engines are asked for it."""
        return str(self.body["model"])

    @property
    def model_name(self) -> str:
        """The model as clients ask for it."""
        return self.model if self.adapter is None else self.adapter.name


async def read_request(
    scope: Scope, receive: Receive, media: MediaReader, stored: StoredResponses | None = None
) -> ClientRequest:
    """Read a request to its end, and fetch the media that it names by URL.

    Args:
        media: of the router, with its settings.

    Raises:
        ApiError: it is not one that can be served; the error says why.
        ClientDisconnect: the client left while it sent.
    """
    headers = Headers(scope=scope)
    raw = await read_body(headers, receive, most_bytes(media.settings))
    lifted = await lifted_body(raw, media.settings)
    goes_on: str | None = None
    if scope["path"] == RESPONSES and stored is not None:
        goes_on = await stored.with_history(lifted, tenant_of(scope))
    arguments = (scope, headers, lifted, media, goes_on)
    try:
        request = await understood(lifted, _understood, *arguments)
    except NotFetched as missing:
        caller = caller_of(scope)
        fetched = await media.fetch(missing, None if caller is None else caller.cache_salt)
        request = await understood(lifted, _understood, *arguments, fetched)
    return replace(request, digest=await understood(lifted, _digest, request, headers, raw))


def _understood(
    scope: Scope,
    headers: Headers,
    lifted: Lifted,
    media: MediaReader,
    goes_on: str | None,
    fetched: Mapping[str, bytes] | None = None,
) -> ClientRequest:
    path, caller, settings = scope["path"], caller_of(scope), media.settings
    tenant, salt = (None, None) if caller is None else (caller.tenant, caller.cache_salt)
    body = read_lifted(lifted, path, settings)
    _, adapter = media.names.find(body.get("model"), models_of(scope), time.monotonic())
    asked = resolved(path, body)
    budget.check(asked, path)
    if path == RESPONSES and body.get(PREVIOUS) is not None:
        # It was looked for as it is written.
        raise ApiError(400, f"write {PREVIOUS} without escapes", param=PREVIOUS)
    try:
        explicit_id = identity.explicit_id(headers, asked)
        own = identity.without_identity(asked)
        said = hints(headers, asked)
        if caller is not None and caller.background and not said.background:
            said = replace(said, priority=-1)
        if (parent := identity.parent_id(headers, asked)) is not None:
            said = replace(said, parent=identity.scoped(tenant, parent))
    except identity.InvalidConversationId as error:
        raise ApiError(400, str(error), "invalid_conversation_id", param=error.source) from None
    except InvalidHint as error:
        raise ApiError(400, str(error), "invalid_hint", param=error.source) from None
    own = as_served(own, path)
    if "billing_header" in settings.volatile_text:
        own = without_billing_header(path, own)
    if path == RESPONSES:
        # A name that the router gives is the same one, whichever decoder goes on with it.
        named = {"request_id": f"resp_{secrets.token_hex(16)}"}
        own = canonical({name: value for name, value in own.items() if name not in named}) | named
    own = _forwarded(own, settings)
    takes_room_left = _asks_by_default(headers, body)
    chat = apis.is_dialogue(path)
    seen = media.named(own, path, lifted, salt, fetched) if chat else own
    parts = 0 if seen is own else len(places(seen, path))
    # Engines keep KV under the tenant's salt, which replaces the client's.
    own = seen if salt is None else {**seen, "cache_salt": salt}
    if adapter is not None:
        own = {**own, "model": adapter.model}
        # vLLM refuses any other.
        if isinstance(before := own.get("cache_salt"), str | None):
            own["cache_salt"] = adapter.salt(before)
    changed = changed_body(lifted.raw, body, own)
    chain: Chain | None = None
    if chat:
        known_by = heard(path, own, settings.volatile_text)
        chain = recognition.chain_of(*known_by, tenant, _MOST_CANDIDATES, continues(path, own))
    product = _PRODUCT.match(headers.get("user-agent", ""))
    if explicit_id is not None or not chat:
        goes_on = identity.scoped(tenant, explicit_id or identity.new_id())
        if adapter is not None and not chat:
            # By its id alone, a completion would continue another adapter's.
            goes_on = identity.further(goes_on, adapter.number)
    return ClientRequest(
        path=path,
        raw=lifted.put_back(changed),
        size=len(changed),
        body=own,
        explicit_id=goes_on,
        chain=chain,
        one_off=explicit_id is None and not chat,
        final=identity.is_final(headers),
        request_id=request_id_of(scope),
        hints=said,
        client=product[0] if product else None,
        tenant=None if caller is None else TurnTenant(caller.tenant, caller.limits, caller.weight),
        takes_room_left=takes_room_left,
        no_output=path == MESSAGES and body.get("max_tokens") == 0,
        unserved_tools=unserved_tools(body) if path == RESPONSES else (),
        ignored_fields=ignored(asked, path),
        media=parts,
        to_encode=media.to_encode(seen, path, lifted) if chat else {},
        adapter=adapter,
    )


def _digest(request: ClientRequest, headers: Headers, raw: bytes) -> bytes:
    tenant = None if request.tenant is None else request.tenant.name
    stated_id = None if request.one_off else request.explicit_id
    keys = (headers.get("authorization"), headers.get("x-api-key"))
    own = repr((request.path, tenant, stated_id, keys, request.model)).encode()
    return hashlib.blake2b(raw, digest_size=16, key=hashlib.sha256(own).digest()).digest()


def _forwarded(body: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a body without what clients may not tell engines, with the model's name."""
    own = {name: value for name, value in body.items() if name not in _NOT_FORWARDED}
    if settings.engine.get("scheduling_policy") != "priority" and type(own.get("priority")) is int:
        # vLLM then refuses any but 0. The hint is read all the same.
        del own["priority"]
    # The other way into the engine's arguments.
    extra = own.get("vllm_xargs")
    if isinstance(extra, dict) and any(name in extra for name in _NOT_FORWARDED):
        own["vllm_xargs"] = {k: v for k, v in extra.items() if k not in _NOT_FORWARDED}
    if own.get("model") != settings.model_id:
        own["model"] = settings.model_id
    return own


def _asks_by_default(headers: Mapping[str, str], body: Mapping[str, Any]) -> bool:
    """Whether the cap on output is a known client's default."""
    client = headers.get("user-agent", "")
    caps = [caps for begins, caps in _DEFAULT_CAPS.items() if client.startswith(begins)]
    return bool(caps) and any(body.get(name) in caps[0] for name in apis.OUTPUT_CAPS)
