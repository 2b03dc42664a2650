"""A caller's end of a table that does not answer."""

import asyncio
from typing import Any

import pytest

from conserve.settings import Settings
from deployments.detached import Patience
from deployments.table_client import Table, TableClient, TableUnavailable


class _Silent:
    """An actor that lives, and answers no call."""

    def __getattr__(self, name: str) -> "_Silent":
        return self

    def remote(self, *arguments: Any) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()


async def test_a_table_that_lives_and_does_not_answer_holds_nobody_up() -> None:
    """An engine's report, for which the end of an answer waits, gives up after a while."""
    client = TableClient("app", "1", Settings())
    client._actor = _Silent()
    with pytest.raises(TableUnavailable, match="did not answer within"):
        await asyncio.wait_for(client._ask(Patience(answer_s=0.05), Table.report), 5)
