"""A decoder goes on hearing its table."""

import asyncio

from conserve.direct import Desk, Notice
from conserve.holdings import Holdings
from deployments.engine.reporter import Reporter


class Table:
    """Answers each call with an empty notice."""

    async def hear(self, engine_id: str, registration: int, heard: int) -> Notice:
        await asyncio.sleep(0)
        return Notice(heard + 1)


async def test_a_notice_that_cannot_be_obeyed_is_not_the_last_one() -> None:
    obeyed, enough = [], asyncio.Event()

    def obey(notice: Notice) -> None:
        obeyed.append(notice)
        if len(obeyed) == 1:
            raise RuntimeError("no")
        enough.set()

    reporter = Reporter("d", Table(), Desk(Holdings(), 60), obey)  # type: ignore[arg-type]
    reporter.registering()
    reporter.registered()
    reporter.start()
    async with asyncio.timeout(10):
        await enough.wait()
    for task in reporter.tasks:
        task.cancel()
