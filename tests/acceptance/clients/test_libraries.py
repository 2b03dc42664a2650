"""Libraries that agents are made with do a task, as they are: one prefill, one handoff."""

from pathlib import Path

import pytest

from tests.acceptance.clients.clients import LIBRARIES, Client
from tests.acceptance.clients.driving import drive, require_served
from tests.engines.applications import CLIENTS

pytestmark = [pytest.mark.anyio, pytest.mark.application(CLIENTS)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
async def test_a_task_is_done(application: str, library: Client, tmp_path: Path) -> None:
    done = await drive(library, application, tmp_path, run=library.name)
    require_served(done)
