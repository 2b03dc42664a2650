"""The actor that keeps the table: it takes over from earlier deployments' tables as it starts.

Its own process loads this module, and so the table's implementation, and so do those that find no
table and make one.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from conserve.conversations import MEMORY_ENVIRONMENT
from conserve.events import Event
from conserve.history import History
from conserve.holdings import Parked
from conserve.settings import Settings
from conserve.turn import TurnKey
from deployments.detached import call, find_or_make
from deployments.table.table import TableService
from deployments.table_client import TableName

logger = logging.getLogger("conserve.table")

_PATIENCE_S = 20.0


def make_table(name: TableName, settings: Settings) -> Any:
    """Return the actor of this name, which the first caller makes."""
    return find_or_make(TableActor, name, name, settings, environment=MEMORY_ENVIRONMENT)


class Legacy(msgspec.Struct):
    """All that the next table cannot learn from engines. Later versions may add to it.

    Attributes:
        histories: with where they are bound, and the turns that run.
        running: turns under way, with their routers and decoders.
        engines: ids of those that will register.
    """

    histories: list[History] = []
    running: list[tuple[TurnKey, str, str]] = []
    parked: list[Parked] = []
    # Another version may have other kinds.
    events: Sequence[tuple[int, float, Any, str, dict[str, Any]]] = ()
    engines: list[str] = []


class TableActor(TableService):
    """A table that takes over from those of earlier deployments as it starts, and ends them.

    To their routers and engines that is a table which dies: they find this one by its name, and
    engines register here with what they hold. Turns that run go on meanwhile.

    Ray runs the constructor before any call, and again if the actor dies: then no earlier one is
    left.
    """

    def __init__(self, name: TableName, settings: Settings) -> None:
        super().__init__(settings)
        for earlier in reversed([one for one in name.alive() if one < name]):
            with contextlib.suppress(ValueError):  # It has just ended.
                actor = ray.get_actor(earlier, namespace="serve")
                try:
                    packed = ray.get(call(actor, TableActor.hand_over), timeout=_PATIENCE_S)
                    self.take_over(msgspec.msgpack.decode(packed, type=Legacy))
                except Exception as error:
                    # What engines hold is enough to go on.
                    logger.warning("nothing is taken over from %s: %s", earlier, error)
                # Its callers come here then.
                ray.kill(actor)

    async def hand_over(self) -> bytes:
        """Return a packed `Legacy`, and begin nothing more."""
        self._recovery.handed_over = True
        table, running = self._table, self._running
        histories = table.live()
        memory = table.memory
        parked = () if memory is None else memory.all_parked(histories)
        turns = [(turn, router, running.decoders[turn]) for turn, router in running.routers.items()]
        engines = [one.id for one in self._registry.infos if one.role != "encoder"]
        legacy = Legacy(
            [msgspec.structs.replace(one, base=None) for one in histories],
            turns, list(parked), self._events.after(0), engines,
        )  # fmt: skip
        logger.info("%d histories go to the next deployment's table", len(histories))
        return msgspec.msgpack.encode(legacy)

    def take_over(self, legacy: Legacy) -> None:
        self._table.take_over(legacy.histories)
        self._registry.parked_before += legacy.parked
        self._events.take_over(Event(*one) for one in legacy.events)
        self._recovery.expects(legacy.engines)
        self._running.may_be_stored = True
        for turn, router_id, decoder_id in legacy.running:
            self._running.routers[turn], self._running.decoders[turn] = router_id, decoder_id
        logger.info("%d histories come from the last deployment's table", len(legacy.histories))
