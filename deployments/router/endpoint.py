"""The ASGI endpoint of the paths that turns come by (`conserve.apis.TURN_PATHS`)."""

import time

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from conserve.direct import Homes
from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.messages import TurnTiming
from deployments.router.access import caller_of
from deployments.router.answer import refuse
from deployments.router.patience import hold_back
from deployments.router.prompt import SystemLengths
from deployments.router.request import read_request
from deployments.router.stored import StoredResponses
from deployments.router.turn import Turn
from deployments.router.upstream import Upstream
from deployments.table.table_client import TableClient


class TurnEndpoint:
    """Reads a request, and serves it as a `Turn` of its own."""

    def __init__(
        self,
        settings: Settings,
        table: TableClient,
        upstream: Upstream,
        router_id: str,
        homes: Homes | None = None,
    ) -> None:
        self._stored = StoredResponses(settings, table, upstream)
        self._settings = settings
        self._table = table
        self._upstream = upstream
        self._systems = SystemLengths(upstream, settings.volatile_text)
        self._router_id = router_id
        self._homes = Homes() if homes is None else homes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.perf_counter()
        try:
            request = await read_request(scope, receive, self._settings, self._stored)
        except ClientDisconnect:
            return
        except ApiError as error:
            caller = caller_of(scope)
            tenant = None if caller is None else caller.tenant
            latency_s = time.perf_counter() - arrived_s
            refused = TurnTiming("refused", latency_s, None, (), tenant=tenant)
            self._table.observe(refused)
            await hold_back(error, arrived_s)
            await refuse(error, [], send, scope["path"])
            return
        turn = Turn(
            request,
            arrived_s,
            send,
            self._table,
            self._upstream,
            self._systems,
            self._router_id,
            self._settings.continue_streams,
            self._homes,
            self._settings.moves_appends,
        )
        await turn.run(receive)
