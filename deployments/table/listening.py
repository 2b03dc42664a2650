"""Tells listeners and a conversation's client what has happened."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from conserve import identity
from conserve.events import Event, EventLog
from deployments.messages import EventPage, EventQuery

# Of a conversation's, so many are shown.
SHOWN_EVENTS = 32
# Listeners are told so often of what has happened, and of so much at a time.
_EVERY_S = 0.2
_MOST_AT_ONCE = 512
# Details that are counted over all tenants, or say how full decoders are.
_OF_OTHERS = ("history", "turn", "ahead", "missing_tokens", "decoders")


async def listen(events: EventLog, query: EventQuery) -> EventPage:
    """Return what has happened, for ``GET /v1/events``; wait until there is something to tell."""
    mine = _of(query.tenant, query.conversation_id)
    # A number that there is not yet is that of a log before this one, whose clock was ahead.
    after = events.newest if query.after is None else min(query.after, events.newest)
    deadline_s = time.monotonic() + query.patience_s
    while True:
        missed, newest = events.missed(after), events.newest
        found = events.after(after, query.kinds, mine)
        if found or missed or time.monotonic() >= deadline_s:
            if len(found) > _MOST_AT_ONCE:
                found = found[:_MOST_AT_ONCE]
                newest = found[-1].number
            return EventPage(newest, missed, [(one.number, one.kind, _json(one)) for one in found])
        after = newest
        await asyncio.sleep(_EVERY_S)


def _of(tenant: str | None, conversation_id: str | None) -> Callable[[str], bool] | None:
    """Says of a history whether it is asked for; None: all are."""
    if conversation_id is not None:
        return lambda history_id: identity.conversation_of(history_id) == conversation_id
    if tenant is not None:
        return lambda history_id: identity.tenant_of(history_id) == tenant
    return None


def _json(event: Event) -> bytes:
    """An event, and of which conversation, or engine."""
    shown: dict[str, Any] = {"number": event.number}
    if event.history_id:
        tenant = identity.tenant_of(event.history_id)
        shown["conversation"] = identity.own_id(event.history_id)
        shown |= {} if tenant is None else {"tenant": tenant}
    return msgspec.json.encode(shown | _view(event))


def own_view(event: Event) -> dict[str, Any]:
    """One of a conversation's events, for its client: without what tells of others."""
    return {name: value for name, value in _view(event).items() if name not in _OF_OTHERS}


def _view(event: Event) -> dict[str, Any]:
    number = identity.number_of(event.history_id)
    return {
        "kind": event.kind,
        "at": round(event.at_s, 3),
        **({} if number is None else {"history": number}),
        **event.details,
    }
