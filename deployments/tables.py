"""The conversation tables of an application's models, as one.

Each model has a table of its own. A conversation has histories in as many of them as it uses
models.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import reduce
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

from conserve.events import Kind
from conserve.pausing import ToolReport
from conserve.settings import Settings
from deployments import answers, messages
from deployments.table_client import TableClient

_T = TypeVar("_T")

# The name of a sample in Prometheus' text format, and the labels that it has.
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( [^ ]+)$", re.ASCII)
_FAMILY = b"# HELP "


class Tables:
    """Asks the tables of all models, and puts their answers together.

    Its methods are those of `TableClient` that do not depend on a model. ``of`` has the tables by
    model.
    """

    def __init__(self, of: dict[str, TableClient]) -> None:
        self.of = of

    async def _all(self, ask: Callable[[TableClient], Awaitable[_T]]) -> dict[str, _T]:
        answered = await asyncio.gather(*map(ask, self.of.values()))
        return dict(zip(self.of, answered, strict=True))

    async def engines(self, *, exact: bool = False, soon: bool = False) -> list[answers.Engine]:
        found = await self._all(lambda table: table.engines(exact=exact, soon=soon))
        return [
            msgspec.structs.replace(one, model=model)
            for model, engines in found.items()
            for one in engines
        ]

    async def drain(self, engine_id: str) -> int | None:
        found = await self._all(lambda table: table.drain(engine_id))
        return next((left for left in found.values() if left is not None), None)

    async def conversation(self, conversation_id: str) -> answers.Conversation | None:
        found = await self._all(lambda table: table.conversation(conversation_id))
        parts = [_marked(one, model) for model, one in found.items() if one is not None]
        return reduce(_joined, parts) if parts else None

    async def conversations(self, limit: int, tenant: str | None = None) -> bytes:
        found = await self._all(lambda table: table.conversations(limit, tenant))
        same: dict[Any, list[answers.Conversation]] = {}
        total = 0
        for model, encoded in found.items():
            listed = _LISTED.decode(encoded)
            total += listed.total
            for one in listed.data:
                same.setdefault((one.tenant, one.id), []).append(_marked(one, model))
        shown = [reduce(_joined, parts) for parts in same.values()]
        total -= sum(len(parts) - 1 for parts in same.values())
        shown.sort(key=lambda one: one.last_used, reverse=True)
        return msgspec.json.encode(answers.Conversations(shown[:limit], total))

    async def cache(self, minutes: int, tenant: str | None = None) -> answers.Cache:
        found = [*(await self._all(lambda table: table.cache(minutes, tenant))).values()]
        by_cause: dict[str, list[answers.CacheCause]] = {}
        for one in (cause for cache in found for cause in cache.causes):
            by_cause.setdefault(one.cause, []).append(one)
        total = sum(cache.tokens for cache in found)
        causes = [
            msgspec.structs.replace(
                max(parts, key=lambda one: one.tokens),
                **{name: sum(getattr(one, name) for one in parts) for name in _SUMS},
                share=round(sum(one.tokens for one in parts) / total, 4),
                joules=sum(one.joules or 0 for one in parts) or None,
            )
            for parts in by_cause.values()
        ]
        causes.sort(key=lambda one: -one.tokens)
        again = sum(cache.again_tokens for cache in found)
        shares = (
            _added([getattr(cache, name) for cache in found]) for name in ("clients", "tenants")
        )
        return answers.Cache(", ".join(self.of), minutes, total, again, causes, *shares)

    async def release(self, conversation_id: str, reason: str = "released") -> bool:
        found = await self._all(lambda table: table.release(conversation_id, reason))
        return any(found.values())

    def finish(self, history_id: str) -> None:
        """End the conversation of a turn that was its last one, with all models."""
        for table in self.of.values():
            table.finish(history_id)

    async def report_tool(self, conversation_id: str, report: ToolReport) -> int | None:
        found = await self._all(lambda table: table.report_tool(conversation_id, report))
        running = [count for count in found.values() if count is not None]
        return max(running, default=None)

    async def metrics(self) -> bytes:
        """Return all metrics, each sample with the label ``model``."""
        found = await self._all(lambda table: table.metrics())
        families: dict[bytes, list[bytes]] = {}
        for model, text in found.items():
            label = b'model="%b"' % re.sub(r'(["\\])', r"\\\1", model).encode()
            for part in text.split(_FAMILY)[1:]:
                name, described, *samples = part.splitlines()
                own = families.setdefault(name.split(b" ", 1)[0], [_FAMILY + name, described])
                own += [_labelled(sample, label) for sample in samples]
        return b"\n".join(line for own in families.values() for line in own) + b"\n"

    async def lifecycle(
        self, conversation_ids: list[str], pressure: messages.HostPressure
    ) -> messages.Lifecycle:
        found = [*(await self._all(lambda t: t.lifecycle(conversation_ids, pressure))).values()]
        standings: dict[str, messages.Standing] = {}
        for one in found:
            if one.standings is None:
                return messages.Lifecycle(found[0].table, None)
            for conversation, standing in one.standings.items():
                known = standings.setdefault(conversation, standing)
                if known.state != "live":
                    standings[conversation] = standing
        # Another number once any of them has begun anew.
        return messages.Lifecycle(sum(one.table for one in found), standings)

    def note(self, kind: Kind, conversation_id: str, details: dict[str, Any]) -> None:
        next(iter(self.of.values())).note(kind, conversation_id, details)


def tables_of(application: str, deployment: str, settings: Settings) -> TableClient | Tables:
    """Return the client of a single model's table, or of those of several."""
    of = {name: TableClient(application, deployment, one) for name, one in settings.each.items()}
    return Tables(of) if len(of) > 1 else next(iter(of.values()))


_SUMS = ("tokens", "turns", "seconds")
_LISTED = msgspec.json.Decoder(answers.Conversations)


def _marked(one: answers.Conversation, model: str) -> answers.Conversation:
    histories = [msgspec.structs.replace(history, model=model) for history in one.histories]
    return msgspec.structs.replace(one, histories=histories)


def _joined(one: answers.Conversation, other: answers.Conversation) -> answers.Conversation:
    """Return both together; the most recently used one has the phase, the decoder and the turn."""
    old, new = sorted((one, other), key=lambda each: each.last_used)
    phases = (new.phase, old.phase)
    # Each has fields of its kind, and so it is no struct.
    events: list[Any] = [*(new.events or ()), *(old.events or ())]
    return msgspec.structs.replace(
        new,
        phase="reasoning" if "reasoning" in phases else new.phase,
        parent=new.parent or old.parent,
        children=[*old.children, *new.children],
        children_total=old.children_total + new.children_total,
        turns=old.turns + new.turns,
        held_tokens=old.held_tokens + new.held_tokens,
        moves=old.moves + new.moves,
        ttfet_s=min((s for s in (old.ttfet_s, new.ttfet_s) if s is not None), default=None),
        created=min(old.created, new.created),
        age_s=max(old.age_s, new.age_s),
        energy_estimate_j=(old.energy_estimate_j or 0) + (new.energy_estimate_j or 0) or None,
        running_tools=max(old.running_tools, new.running_tools),
        histories=[*new.histories, *old.histories],
        histories_total=old.histories_total + new.histories_total,
        events=sorted(events, key=itemgetter("at"), reverse=True) if events else new.events,
    )


def _added(counts: list[dict[str, dict[Any, int]]]) -> dict[str, dict[Any, int]]:
    """Return the sums of counts by name and cause."""
    total: dict[str, Counter[Any]] = {}
    for name, causes in (item for one in counts for item in one.items()):
        total.setdefault(name, Counter()).update(causes)
    return {name: dict(causes.most_common()) for name, causes in total.items()}


def _labelled(sample: bytes, label: bytes) -> bytes:
    found = _SAMPLE.match(sample)
    if found is None:
        return sample
    name, labels, value = found.groups()
    if labels and b'model="' in labels:
        return sample
    return b"%b{%b}%b" % (name, b",".join(filter(None, (label, labels))), value)
