"""Many first turns that are cancelled, at each of several moments: no engine goes with them.

`make test-cancelling` runs this, not `make test`, which has a part of it in
`tests/engines/faults/test_cancel.py`: it takes ten minutes.
"""

import random

import httpx
import pytest

from tests.engines.applications import MAIN
from tests.engines.faults.test_cancel import require_no_engine_lost

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN, last=True)]


@pytest.mark.parametrize("after_s", [0.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("clients", [64, 150, 300])
async def test_no_engine_is_lost(
    application: str, client: httpx.AsyncClient, rng: random.Random, clients: int, after_s: float
) -> None:
    await require_no_engine_lost(client, rng, clients, after_s)
