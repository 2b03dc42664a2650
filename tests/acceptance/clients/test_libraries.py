"""Libraries that agents are made with do a task, as they are: one prefill, one handoff."""

from pathlib import Path

import pytest

from tests.acceptance.clients.clients import BLOCK, LIBRARIES, PAGE, PROGRAMS, Client
from tests.acceptance.clients.driving import drive, require_served
from tests.engines.applications import CLIENTS

pytestmark = [pytest.mark.anyio, pytest.mark.application(CLIENTS)]


def test_each_client_of_the_page_is_tried() -> None:
    tried = {client.name.partition(",")[0] for client in (*LIBRARIES, *PROGRAMS)}
    assert {name for name, _, _ in BLOCK.findall(PAGE)} == tried
    assert PAGE.count("<!-- client: ") == len(BLOCK.findall(PAGE))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
async def test_a_task_is_done(application: str, library: Client, tmp_path: Path) -> None:
    done = await drive(library, application, tmp_path, run=library.name)
    require_served(done)
