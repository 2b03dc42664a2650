"""The client of a table that is not there: a test answers for it."""

import inspect
from typing import Any

import msgspec

from conserve.conversations import ConversationTable
from conserve.placement import ConversationPlacement
from conserve.wire import Role
from deployments.answers import Engine
from deployments.detached import Patience, unrefused
from deployments.messages import EngineInfo
from deployments.table import registry
from deployments.table.views import engine_view
from deployments.table_client import TableClient


def listed_engine(id_: str, role: Role = "decoder", **changes: Any) -> Engine:
    """An idle engine as `/v1/engines` lists it."""
    info = EngineInfo(id_, role, f"http://{id_}", 1, 1000, 900)
    table = ConversationTable(ConversationPlacement(), idle_timeout_s=60)
    return msgspec.structs.replace(engine_view(registry.Engine(info, 0.0), table), **changes)


class StubTable(TableClient):
    """Answers what is asked of the table, by the method's name; anything else fails the test.

    Args:
        answers: an answer, an exception, or what makes an answer of what is given; what the table
            is told needs an entry, too.

    Attributes:
        asked, told: methods, and what they were given.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        self.told: list[Any] = []

    async def call(self, method: str, *given: Any) -> Any:
        """Answer in the table's place."""
        assert method in self.answers, f"the table was asked: {method}"
        self.asked.append((method, *given))
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        answer = answer(*given) if callable(answer) else answer
        return await answer if inspect.isawaitable(answer) else answer

    def tell(self, method: str, *given: Any) -> None:
        """Take what the table would be told."""
        assert method in self.answers, f"the table was told: {method}"
        self.told.append((method, *given))

    async def _ask(self, patience: Patience, method: Any, *given: Any, **named: Any) -> Any:
        return unrefused(await self.call(method.__name__, *given))

    def _tell(self, method: Any, *given: Any, **named: Any) -> None:
        self.tell(method.__name__, *given)
