"""How routers, engines and what runs tools call the conversation table."""

import asyncio
import contextlib
import hashlib
import json
from typing import Any, Protocol, Self

import ray

from conserve.direct import Notice, Report
from conserve.events import Kind
from conserve.pausing import ToolReport
from conserve.placement.load import EngineLoad
from conserve.settings import Settings
from conserve.turn import TurnKey, TurnStats
from conserve.wire import SILENCE_S, Lack
from deployments import answers, messages
from deployments.detached import USUAL, ActorClient, Patience, asks, listed
from hetero.energy import EngineEnergy


class TableName(str):
    """The name of a deployment's table; those of later deployments compare as greater.

    Engines with another model or other arguments need another table: no history can move between
    them and those before.
    """

    @classmethod
    def of(cls, application: str, deployment: str, settings: Settings) -> Self:
        own = [settings.of_role(role).engine for role in ("decoder", "prefiller")]
        said = json.dumps([settings.model, settings.model_id, settings.engine, *own], default=str)
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        return cls(f"conserve:{application}:table:{digest}:{deployment}")

    def alive(self) -> list[str]:
        """Return the names of the tables that live, the oldest first; this one's may be there."""
        return sorted(listed(self[: self.rindex(":") + 1]))


class Table(Protocol):
    """The calls that the conversation table's actor takes (`deployments.table.table`)."""

    # --- of routers --------------------------------------------------------------------------

    async def begin(
        self, asked: messages.BeginTurn
    ) -> messages.TurnPlan | messages.Uncounted | messages.Refusal:
        """Begin a turn where its history is bound, or where there is room; waits for that."""

    async def cancel(self, router_id: str, number: int) -> None:
        """Give up a call of `begin` that has not returned."""

    async def prefilled(self, plan: messages.TurnPlan, done: TurnStats | None) -> None:
        """Note that the remote prefill is over; ``done`` is None if it failed."""

    async def abandon(self, turn: TurnKey) -> None:
        """End a turn that did not complete."""

    async def observe(self, turn: TurnKey | None, stats: TurnStats) -> None:
        """Note how a client was served; ``turn`` is None if its turn was bound nowhere."""

    async def report_tool(
        self, conversation_id: str, report: ToolReport
    ) -> int | messages.Refusal | None:
        """Note that a tool begins or ends; returns how many run (None: unknown conversation)."""

    async def release(self, conversation_id: str, reason: str = "released") -> bool:
        """End a conversation's histories; returns whether there were any."""

    async def router_beat(
        self, router_id: str, timeouts: messages.Timeouts | None = None, others: Lack | None = None
    ) -> messages.RouterHeard:
        """Note that a router lives, and take its timeouts, if any; returns what it has to know.

        ``others`` is what other models lack, where they share GPUs.
        """

    async def engine_lost(self, engine_id: str, why: str) -> None:
        """Remove an engine that a router cannot reach."""

    async def drain(self, engine_id: str) -> int | messages.Refusal | None:
        """Move an engine's conversations; return how many it has left, None: no such engine."""

    async def health(self) -> answers.Alive:
        """Count the engines of each role that are alive, and those that start, by what they do."""

    async def engines(self, exact: bool = False) -> list[answers.Engine]:
        """Return the engines alive; ``exact``: wait for what decoders have done just now."""

    async def conversation(self, conversation_id: str) -> answers.Conversation | None:
        """Return a conversation for `GET /v1/conversations/{id}`; None if it is unknown."""

    async def conversations(self, limit: int, tenant: str | None = None) -> bytes:
        """Return the most recently used conversations of a tenant, or of all (None), as JSON."""

    async def cache(self, minutes: int, tenant: str | None = None) -> answers.Cache:
        """Return why a tenant's prompt tokens were computed, or those of all (None)."""

    async def recording(self, after: int, tenant: str | None = None) -> answers.Recording:
        """Return a tenant's turns that have ended since (0: now), or all (None); may wait."""

    async def events(self, query: messages.EventQuery) -> messages.EventPage:
        """Return what has happened, for `GET /v1/events`; may wait for it."""

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""

    # --- of engines --------------------------------------------------------------------------

    async def engine_starting(self, engine: messages.EngineStarting) -> None:
        """Note what an engine does that is not ready yet."""

    async def register(self, engine: messages.EngineInfo) -> list[tuple[str, int]]:
        """Add an engine that is ready; returns histories (and incarnations) to forget."""

    async def beat(
        self,
        engine_id: str,
        energy: EngineEnergy | None = None,
        load: EngineLoad | None = None,
        scheduler: messages.SchedulerLoad | None = None,
    ) -> messages.Heard | None:
        """Note that an engine lives; returns what it has to know, or None: register again."""

    async def leave(self, engine_id: str, overdue: bool) -> bool:
        """Give an engine nothing new; returns whether it should stay, and ask again.

        If it is ``overdue``, its histories are unbound, each once none of its turns runs.
        """

    async def left(self, engine_id: str) -> None:
        """Remove an engine that was leaving, and ends now."""

    async def hear(self, decoder_id: str, registration: int, heard: int) -> Notice | None:
        """Return what a decoder has to know before it begins more; None: register again.

        Args:
            heard: the last notice that the decoder has obeyed. For a newer one it waits for a beat.
        """

    async def report(self, decoder_id: str, registration: int, report: Report) -> bool | None:
        """Note what a decoder has done; None: register again.

        Returns whether turns that begin now leave their KV in host memory.
        """

    async def prefetched(self, history_id: str, tokens: int) -> None:
        """Note that an engine has loaded what it was told to of a history, or what there was."""

    # --- of what runs conversations' tools ---------------------------------------------------

    async def lifecycle(
        self, conversation_ids: list[str], pressure: messages.HostPressure
    ) -> messages.Lifecycle:
        """Return how these conversations stand, and note the pressure on their tools' machine."""

    async def note(self, kind: Kind, conversation_id: str, details: dict[str, Any]) -> None:
        """Add an event of a conversation."""


# The metric that a router answers in the table's place, and what it says.
TABLE_UP = (
    "conserve_table_up",
    "1: the conversation table answered this scrape; 0: the router did, without the table.",
)


class TableUnavailable(Exception):
    """The conversation table did not answer in time; Ray is starting it again."""


# For callers that ask again soon, and for those that look at the application's health.
_NONE = Patience(0.0, 10.0)
_SOME = Patience(5.0, 10.0)
# For a decoder's reports: the next one tells of this one's turns, too.
_REPORTING = Patience(1.0, SILENCE_S)


class TableClient(ActorClient):
    """A caller's end of the table. Its methods are those of `Table`, which describes them.

    All that return something raise `TableUnavailable` if the table stays down or does not answer,
    and `ApiError` if it refuses. Those that return nothing do not wait for an answer. A turn whose
    call of `begin` is cancelled is given back.
    """

    def __init__(self, application: str, deployment: str, settings: Settings) -> None:
        self._name = TableName.of(application, deployment, settings)
        self._settings = settings

    # --- of routers --------------------------------------------------------------------------

    async def begin(self, asked: messages.BeginTurn) -> messages.TurnPlan | messages.Uncounted:
        asking: asyncio.Future[Any] = asyncio.ensure_future(self._ask(USUAL, Table.begin, asked))
        try:
            answer: messages.TurnPlan | messages.Uncounted = await asyncio.shield(asking)
            return answer
        except asyncio.CancelledError:
            self._tell(Table.cancel, asked.router_id, asked.number)
            asking.add_done_callback(self._give_back)
            raise

    def prefilled(self, plan: messages.TurnPlan, done: TurnStats | None) -> None:
        self._tell(Table.prefilled, plan, done)

    def abandon(self, plan: messages.TurnPlan) -> None:
        """End a turn that got to no decoder."""
        self._tell(Table.abandon, plan.turn)

    def observe(self, turn: TurnKey | None, stats: TurnStats) -> None:
        self._tell(Table.observe, turn, stats)

    def finish(self, history_id: str) -> None:
        """End the conversation of a turn that was its last one."""
        self._tell(Table.release, history_id, "final")

    async def engines(self, *, exact: bool = False, soon: bool = False) -> list[answers.Engine]:
        """Return the engines alive.

        Args:
            soon: whether a table that does not answer within ten seconds is unavailable.
        """
        return await self._ask(_SOME if soon else USUAL, Table.engines, exact)

    async def events(self, query: messages.EventQuery) -> messages.EventPage:
        patience = Patience(0.0, 2 * max(10.0, query.patience_s))
        return await self._ask(patience, Table.events, query)

    release = asks(Table.release)
    report_tool = asks(Table.report_tool)
    router_beat = asks(Table.router_beat)
    engine_lost = asks(Table.engine_lost)
    health = asks(Table.health, _SOME)
    drain = asks(Table.drain)
    conversation = asks(Table.conversation)
    conversations = asks(Table.conversations)
    cache = asks(Table.cache)
    recording = asks(Table.recording)
    metrics = asks(Table.metrics)

    # --- of engines --------------------------------------------------------------------------

    def engine_starting(self, engine: messages.EngineStarting) -> None:
        self._tell(Table.engine_starting, engine)

    def prefetched(self, history_id: str, tokens: int) -> None:
        self._tell(Table.prefetched, history_id, tokens)

    register = asks(Table.register)
    beat = asks(Table.beat)
    leave = asks(Table.leave)
    left = asks(Table.left)
    hear = asks(Table.hear, _REPORTING)
    report = asks(Table.report, _REPORTING)

    # --- of what runs conversations' tools ---------------------------------------------------

    lifecycle = asks(Table.lifecycle, _NONE)

    def note(self, kind: Kind, conversation_id: str, details: dict[str, Any]) -> None:
        self._tell(Table.note, kind, conversation_id, details)

    # --- how ---------------------------------------------------------------------------------

    def _give_back(self, asking: "asyncio.Future[Any]") -> None:
        """End a turn that had begun when its call was cancelled."""
        if asking.cancelled() or asking.exception() is not None:
            return
        if isinstance(plan := asking.result(), messages.TurnPlan):
            self.abandon(plan)

    def _unavailable(self, why: str) -> Exception:
        return TableUnavailable(f"the conversation table {why}")

    def _connect(self) -> Any:
        """Find the newest deployment's table: it has taken over from those before."""
        while self._actor is None:
            newest = max(self._name.alive(), default="")
            if newest >= self._name:
                with contextlib.suppress(ValueError):  # The table has just ended.
                    self._actor = ray.get_actor(newest, namespace="serve")
            if self._actor is None and newest <= self._name:
                # Only a process that makes the table loads its implementation.
                from deployments.table.actor import make_table

                self._actor = make_table(self._name, self._settings)
        return self._actor
