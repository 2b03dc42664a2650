"""An engine's own app around any other, on any client."""

from types import SimpleNamespace
from typing import Any

from conserve.direct import Desk
from conserve.holdings import Holdings
from deployments.engine.reporter import LoadMeter
from deployments.engine.turns import EngineTurns
from deployments.engine.vision.images import FailedImages


def engine_turns(app: Any, client: Any = None, **more: Any) -> EngineTurns:
    """Follow requests of an engine whose workers, if it has any, store nothing."""
    holdings = more.pop("holdings", None) or Holdings()
    given = {
        "desk": Desk(holdings, 60),
        "meter": LoadMeter({}),
        "failed": FailedImages(list),
        "missing_tokens": lambda _: 0,
        "stores": False,
        **more,
    }
    return EngineTurns(app, client or SimpleNamespace(generate=None), holdings, **given)
