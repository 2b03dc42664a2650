"""The client of a table that is not there: a test answers for it."""

from typing import Any

import msgspec

from conserve.conversations import ConversationTable
from conserve.placement import ConversationPlacement
from conserve.wire import Role
from deployments.answers import Engine
from deployments.detached import Patience, unrefused
from deployments.messages import EngineInfo
from deployments.table.views import engine_view
from deployments.table_client import TableClient


def listed_engine(id_: str, role: Role = "decoder", **changes: Any) -> Engine:
    """An idle engine as `/v1/engines` lists it."""
    info = EngineInfo(id_, role, f"http://{id_}", 1, 1000, 900)
    table = ConversationTable(ConversationPlacement(), idle_timeout_s=60)
    return msgspec.structs.replace(engine_view(info, table, None), **changes)


class StubTable(TableClient):
    """Passes on what is asked of the table, and what it is told, by the method's name."""

    def __init__(self) -> None:
        """Nothing is connected to."""

    async def call(self, method: str, *given: Any) -> Any:
        """Answer in the table's place."""
        raise AssertionError(f"the table was asked: {method}")

    def tell(self, method: str, *given: Any) -> None:
        """Take what the table would be told."""
        raise AssertionError(f"the table was told: {method}")

    async def _ask(self, patience: Patience, method: Any, *given: Any, **named: Any) -> Any:
        return unrefused(await self.call(method.__name__, *given))

    def _tell(self, method: Any, *given: Any, **named: Any) -> None:
        self.tell(method.__name__, *given)
