"""The client of a table that is not there: a test answers for it."""

from typing import Any

from deployments.detached import Patience
from deployments.messages import unrefused
from deployments.table.table_client import TableClient


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
