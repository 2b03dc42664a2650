"""Makes the answers of ``GET /v1/...`` about conversations, engines and events."""

import asyncio
import dataclasses
import heapq
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec

from conserve import identity
from conserve.admission import Ticket
from conserve.cache_account import ABOUT, NEW, OTHERS, Key, Spent
from conserve.conversations import ConversationTable
from conserve.events import Event, EventLog
from conserve.histories.prefixes import held_together
from conserve.history import History, State
from conserve.pausing import RunningTools
from conserve.pausing.tools import Running
from conserve.placement.load import EngineLoad
from conserve.why import Cause
from deployments import answers
from deployments.messages import EventPage, EventQuery, Standing
from deployments.table import lines
from deployments.table.registry import Engine

# The newest events of a conversation that are shown with it.
SHOWN_EVENTS = 32
# How often a listener is told of events, and how many at a time.
_EVERY_S = 0.5
_MOST_AT_ONCE = 512
# Details that tell of other conversations or tenants, or of how full decoders are.
_OF_OTHERS = ("turn", "ahead", "missing_tokens", "decoders")


async def listen(events: EventLog, query: EventQuery) -> EventPage:
    """Return what has happened; wait until there is something to tell."""
    mine = _of(query.tenant, query.conversation_id)
    # A number above the newest is of an earlier table's log, whose clock was ahead.
    after = events.newest if query.after is None else min(query.after, events.newest)
    if query.patience_s and events.newest - after < _MOST_AT_ONCE:
        # Each call costs more than the events that it brings.
        await asyncio.sleep(_EVERY_S)
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
    """Return a test by a history's id; None: all are asked for."""
    if conversation_id is not None:
        return lambda history_id: identity.conversation_of(history_id) == conversation_id
    if tenant is not None:
        return lambda history_id: identity.tenant_of(history_id) == tenant
    return None


def _json(event: Event) -> bytes:
    """Encode an event, and which conversation or engine it is of."""
    whose = lines.whose(event.history_id)
    return msgspec.json.encode({"number": event.number} | whose | _event(event))


def own_event(event: Event) -> answers.Event:
    """Return one of a conversation's events for its client, without what tells of others."""
    shown = {name: value for name, value in _event(event).items() if name not in _OF_OTHERS}
    # Its other fields depend on its kind.
    return cast(answers.Event, shown)


def _event(event: Event) -> dict[str, Any]:
    # As `answers.Event` has them.
    return {"kind": event.kind, "at": round(event.at_s, 3), **event.details}


# The histories of a conversation that are shown: an id that many clients share has thousands.
SHOWN_HISTORIES = 64


def conversation_view(
    conversation_id: str,
    table: ConversationTable,
    now_s: float,
    why: Mapping[str, str],
    events: Sequence[Event] | None = None,
) -> answers.Conversation | None:
    """Return one conversation, with its tenant where there are keys; None if it has no history.

    The most recently used history's decoder and last turn are shown. ``why`` has reasons of slow
    last turns, by history. Without ``events`` they are left out.
    """
    histories, tools = table.histories(conversation_id), table.tools
    if not histories:
        return None
    parent = table.parents.parent(conversation_id)
    children = table.parents.children(conversation_id)
    newest = max(histories, key=lambda one: one.last_used_s)
    ttfet_s = next((one.ttfet_s for one in histories if one.ttfet_s is not None), None)
    first = min(histories, key=lambda one: one.created_s)
    tenant = identity.tenant_of(newest.id)
    energy_j = sum(one.energy_j for one in histories)
    return answers.Conversation(
        id=identity.own_id(newest.id),
        tenant=msgspec.UNSET if tenant is None else tenant,
        phase=_phase(histories),
        parent=None if parent is None else identity.own_id(parent),
        children=[identity.own_id(one) for one in itertools.islice(children, SHOWN_HISTORIES)],
        children_total=len(children),
        turns=sum(one.turns for one in histories),
        held_tokens=held_together(histories),
        decoder=newest.home,
        moves=sum(one.moves for one in histories),
        ttfet_s=None if ttfet_s is None else round(ttfet_s, 4),
        created=int(first.created_s),
        age_s=round(max(0.0, now_s - first.created_s), 3),
        last_used=int(newest.last_used_s),
        idle_s=round(max(0.0, now_s - newest.last_used_s), 3),
        last_turn=_last_turn(newest, why),
        energy_estimate_j=round(energy_j, 3) if energy_j else None,
        running_tools=sum(len(tools.running(one.id)) for one in histories),
        histories=[_history(one, now_s, tools, why) for one in _recent(histories)],
        histories_total=len(histories),
        events=msgspec.UNSET if events is None else [own_event(one) for one in events],
    )


def _phase(histories: Sequence[History]) -> answers.Phase:
    """`reasoning` while any turn runs, `paused` while none is on a decoder, else `acting`."""
    if any(one.state is State.RUNNING for one in histories):
        return "reasoning"
    return "paused" if all(one.home is None for one in histories) else "acting"


def _recent(histories: Sequence[History]) -> Sequence[History]:
    if len(histories) <= SHOWN_HISTORIES:
        return histories
    return heapq.nlargest(SHOWN_HISTORIES, histories, key=lambda one: one.last_used_s)


def _history(
    history: History, now_s: float, tools: RunningTools, why: Mapping[str, str]
) -> answers.History:
    hints = {} if history.hints is None else dataclasses.asdict(history.hints)
    hints.pop("parent", None)  # It is the conversation's.
    return answers.History(
        adapter=history.adapter.partition("@")[0] or msgspec.UNSET,
        phase=_phase([history]),
        turns=history.turns,
        held_tokens=history.held_tokens,
        shared_tokens=history.shared_tokens,
        decoder=history.home,
        moves=history.moves,
        age_s=round(max(0.0, now_s - history.created_s), 3),
        idle_s=round(max(0.0, now_s - history.last_used_s), 3),
        last_turn=_last_turn(history, why),
        hints={name: value for name, value in hints.items() if value is not None},
        called=history.tool,
        running_tools=[_running(one, now_s) for one in tools.running(history.id)],
    )


def _running(one: Running, now_s: float) -> answers.RunningTool:
    running_s = round(max(0.0, now_s - one.started_s), 3)
    call_id = msgspec.UNSET if one.call_id is None else one.call_id
    return answers.RunningTool(one.tool, running_s, call_id)


def _last_turn(history: History, why: Mapping[str, str]) -> answers.Turn | None:
    last = history.last_turn
    if last is None:
        return None
    said = {
        name: getattr(last, name) or 0 for name in answers.Turn.__struct_fields__ if name != "why"
    }
    times_s = {name: round(value, 4) for name, value in said.items() if isinstance(value, float)}
    return answers.Turn(**said | times_s, why=why.get(history.id, msgspec.UNSET))


def engine_view(known: Engine, table: ConversationTable) -> answers.Engine:
    engine, load = known.info, known.load
    decoder = table.decoders.get(engine.id)
    prefiller = table.prefillers.get(engine.id)
    return answers.Engine(
        id=engine.id, role=engine.role, hosts=engine.hosts, url=engine.url, pid=engine.pid,
        leaving=known.leaving, capacity_tokens=engine.capacity_tokens,
        max_model_len=engine.max_model_len, max_batched_tokens=engine.max_batched_tokens,
        held_tokens=decoder.held_tokens if decoder else None,
        conversations=decoder.conversations if decoder else None,
        queued_tokens=prefiller.queued_tokens if prefiller else None,
        load=None if load is None else _load(load),
        handoff_s={str(tokens): round(cost_s, 4) for tokens, cost_s in engine.handoffs},
        cache_check=engine.cache_check, tier=engine.tier, gpus=list(engine.gpus),
        sm_slots=engine.sm_slots or msgspec.UNSET,
        sms=engine.sms if engine.sm_slots else msgspec.UNSET, cache_metrics=engine.cache_metrics,
    )  # fmt: skip


def _load(load: EngineLoad) -> answers.EngineLoad:
    return answers.EngineLoad(
        load.prefill_tokens,
        load.decodes,
        # 0 stands for what is not known.
        round(load.step_s, 6) or None,
        round(load.prefill_tokens_per_s, 1) or None,
        list(load.adapters) or msgspec.UNSET,
    )


# Clients and tenants that are listed; those with fewer tokens are counted as one.
_SHARES = 20


def cache_view(spent: Mapping[Key, Spent], minutes: int, model_id: str) -> answers.Cache:
    by_cause: dict[Cause, Spent] = {}
    for key, one in spent.items():
        by_cause.setdefault(key.cause, Spent()).add(one)
    tokens = sum(one.tokens for one in by_cause.values())
    causes = [
        answers.CacheCause(
            cause, ABOUT[cause][0], one.tokens, round(one.tokens / tokens, 4), one.turns,
            round(one.seconds, 3), round(one.joules, 1) or None, ABOUT[cause][1],
            identity.own_id(one.example) or msgspec.UNSET,
            identity.tenant_of(one.example) or msgspec.UNSET, one.where or msgspec.UNSET,
        )
        for cause, one in sorted(by_cause.items(), key=lambda item: -item[1].tokens)
    ]  # fmt: skip
    again_tokens = sum(one.tokens for one in causes if one.cause not in NEW)
    by = (_shares(spent, lambda key: key.client), _shares(spent, lambda key: key.tenant))
    return answers.Cache(model_id, minutes, tokens, again_tokens, causes, *by)


def _shares(
    spent: Mapping[Key, Spent], name_of: Callable[[Key], str | None]
) -> dict[str, dict[Cause, int]]:
    sums: defaultdict[str, Counter[Cause]] = defaultdict(Counter)
    for key, one in spent.items():
        if (name := name_of(key)) is not None:
            sums[name][key.cause] += one.tokens
    shares: defaultdict[str, Counter[Cause]] = defaultdict(Counter)
    for place, name in enumerate(sorted(sums, key=lambda one: -sums[one].total())):
        shares[name if place < _SHARES else OTHERS] += sums[name]
    return {name: dict(causes.most_common()) for name, causes in shares.items()}


# --- the newest conversations ---------------------------------------------------------------------


_T = TypeVar("_T")

# Histories that are looked at, and conversations that are encoded, before other calls get their
# turn: each takes a few milliseconds.
_LOOKED_AT = 8192
_SHOWN = 256


async def list_recent(
    table: ConversationTable,
    limit: int,
    now_s: float,
    why: Mapping[str, str],
    tenant: str | None = None,
) -> bytes:
    """Return the most recently used conversations, the most recent first, as a JSON list.

    Other calls are served meanwhile. Conversations that end meanwhile are left out, and new ones
    are not in it.
    """
    live = table.live()
    beginning = "" if tenant is None else identity.scoped(tenant, "")
    newest: list[History] = []
    # The most recently used history of each conversation that has several.
    several: dict[str, History] = {}
    used_s = attrgetter("last_used_s")
    for part in _slices(live, _LOOKED_AT):
        least_s = newest[-1].last_used_s if len(newest) == limit else float("-inf")
        for history in part:
            if history.last_used_s > least_s and history.id.startswith(beginning):
                if table.has_several(history.id):
                    name = identity.conversation_of(history.id)
                    several[name] = max(several.get(name, history), history, key=used_s)
                else:
                    newest.append(history)
        newest = sorted(newest, key=used_s, reverse=True)[:limit]
        await asyncio.sleep(0)
    for part in _slices(list(several.values()), _LOOKED_AT):
        newest = sorted([*newest, *part], key=used_s, reverse=True)[:limit]
        await asyncio.sleep(0)
    parts = []
    # A conversation that got its second history meanwhile may be there twice.
    names = dict.fromkeys(identity.conversation_of(one.id) for one in newest)
    for shown in _slices([*names], _SHOWN):
        for name in shown:
            view = conversation_view(name, table, now_s, why)
            if view is not None:
                parts.append(msgspec.json.encode(view))
                if view.histories_total > _SHOWN:
                    await asyncio.sleep(0)
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _slices(whole: Sequence[_T], length: int) -> Iterator[Sequence[_T]]:
    return (whole[at : at + length] for at in range(0, len(whole), length))


def standings(
    conversation_ids: Collection[str],
    table: ConversationTable,
    waiting: Iterable[Ticket],
    pending: Collection[str],
) -> dict[str, Standing]:
    """Return how these conversations stand; unknown ones are left out.

    ``waiting`` is the queue in admission order, and ``pending`` has ids of histories being placed.
    """
    asked = set(conversation_ids)
    found: dict[str, Standing] = {}
    for place, ticket in enumerate(waiting):
        conversation_id = identity.conversation_of(ticket.history_id)
        if conversation_id in asked:
            # The first of its histories counts.
            found.setdefault(conversation_id, Standing("waiting", place))
    placed = {identity.conversation_of(history_id) for history_id in pending}
    for conversation_id in asked:
        histories = table.histories(conversation_id)
        if any(one.home is not None for one in histories):
            found[conversation_id] = Standing("live")
        elif histories or conversation_id in placed:
            found.setdefault(conversation_id, Standing("live"))
    return found
