"""``GET /v1/conversations``, of however many: in slices, and turns are placed between them."""

import asyncio
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from conserve import identity
from conserve.conversations import ConversationTable
from conserve.history import History
from deployments.table.views import conversation_view

_T = TypeVar("_T")

# Looked at in one go, and shown in one go: a millisecond each, or a few.
_LOOKED_AT = 8192
_SHOWN = 256


async def list_recent(
    table: ConversationTable, limit: int, now_s: float, tenant: str | None = None
) -> bytes:
    """The most recently used conversations, the most recent first, as a JSON list.

    They are those that lived when it was asked for, by when they were last used then or since;
    what has ended meanwhile is left out.

    Args:
        limit: how many at most.
        now_s: Unix time.
        tenant: of this one alone; None: of all.
    """
    live = table.live()
    beginning = "" if tenant is None else identity.scoped(tenant, "")
    newest: list[tuple[float, int, History]] = []
    # The count makes each entry unlike any other, so that no two conversations are compared.
    count = itertools.count(0, -1)
    # Of a conversation with several histories, the one that was used last stands for it.
    several: dict[str, History] = {}

    def take(history: History) -> None:
        entry = (history.last_used_s, next(count), history)
        if len(newest) < limit:
            heapq.heappush(newest, entry)
        elif history.last_used_s > newest[0][0]:
            heapq.heappushpop(newest, entry)

    for part in _slices(live, _LOOKED_AT):
        least_s = newest[0][0] if len(newest) == limit else float("-inf")
        for history in part:
            if history.last_used_s > least_s and history.id.startswith(beginning):
                if table.has_several(history.id):
                    name = identity.conversation_of(history.id)
                    other = several.setdefault(name, history)
                    if history.last_used_s > other.last_used_s:
                        several[name] = history
                    continue
                take(history)
                if len(newest) == limit:
                    least_s = newest[0][0]
        await asyncio.sleep(0)
    for part in _slices(list(several.values()), _LOOKED_AT):
        for history in part:
            take(history)
        await asyncio.sleep(0)
    newest.sort(reverse=True)
    parts = []
    # One that had several histories may have been met as one of them and as the other.
    names = dict.fromkeys(identity.conversation_of(one.id) for _, _, one in newest)
    for shown in _slices([*names], _SHOWN):
        for name in shown:
            histories = table.histories(name)
            if histories:
                parts.append(msgspec.json.encode(conversation_view(histories, now_s, table.tools)))
            if len(histories) > _SHOWN:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _slices(whole: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    return (whole[at : at + length] for at in range(0, len(whole), length))
