"""Every answer of ConServe's own paths is as `/openapi.json` says, and the other way round."""

from typing import Any

import httpx
import pytest

from conserve.pausing import ToolReport
from conserve.placement.load import EngineLoad
from conserve.settings import Settings
from conserve_tools.routes import EnvironmentClient, EnvironmentPaths
from conserve_tools.service import EnvironmentService
from deployments.detached import unrefused
from deployments.messages import EngineStarting
from deployments.router.frontdoor import FrontDoor
from deployments.table.table import TableService
from tests.unit.conserve_tools.world import World, root, world
from tests.unit.deployments.router.described import check, own_operations, template_of
from tests.unit.deployments.stub_table import StubTable
from tests.unit.deployments.table.drive import Drive, engine
from tests.unit.deployments.table.test_hosts import a_service

__all__ = ["root", "world"]

ANTHROPIC = {"anthropic-version": "2023-06-01"}
CONVERSATION = "/v1/conversations/a%2Fb"
ENVIRONMENTS = CONVERSATION + "/environments"
# Where `test_apis` has the answer of a router with engines compared.
ELSEWHERE = {
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/{id}/input_items"),
    ("DELETE", "/v1/responses/{id}"),
}


class Table(StubTable):
    """The real table, called without Ray."""

    def __init__(self, service: TableService) -> None:
        self._service = service

    async def call(self, method: str, *given: Any) -> Any:
        return await getattr(self._service, method)(*given)

    def tell(self, method: str, *given: Any) -> None:
        assert method == "observe"


class Environments(EnvironmentClient):
    """The real manager of environments, called without Ray."""

    def __init__(self, service: EnvironmentService) -> None:
        self._service = service

    async def _ask(self, patience: Any, method: Any, *given: Any, **named: Any) -> Any:
        return unrefused(await getattr(self._service, method.__name__)(*given))

    async def run(self, conversation_id: str, name: str, body: Any) -> Any:
        return unrefused(await self._service.run("run", conversation_id, name, body))


async def a_busy_service() -> Drive:
    """Engines of both roles, one that starts, a conversation at rest and one with a turn."""
    service = await a_service("d")
    await service.register(engine("parted", sm_slots=7, sms=92, handoffs=((128, 0.1),)))
    await service.engine_starting(EngineStarting("d2", "warming up"))
    await service.beat("d", None, EngineLoad(700, 3, 0.02, 5000.0))
    await service.turn("a/b", ends=True)
    await service.turn("c")
    await service.report_tool("a/b", ToolReport("bash", "call 1"))
    return service


class Client:
    """Asks a router, and has each answer compared."""

    def __init__(self, service: TableService, environments: EnvironmentService) -> None:
        self.door = FrontDoor(
            Settings(), Table(service), "router", [EnvironmentPaths(Environments(environments))]
        )
        transport = httpx.ASGITransport(self.door)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
        self.seen: set[tuple[str, str | None]] = set()

    async def __call__(self, method: str, path: str, status: int = 200, **given: Any) -> Any:
        answer = await self._http.request(method, path, **given)
        assert answer.status_code == status, answer.text
        body = answer.json()
        asked = path.partition("?")[0]
        check(method, asked, status, body)
        if status == 200:
            self.seen.add((method, template_of(asked)))
        return body


@pytest.fixture
async def client(world: World) -> Client:
    return Client(await a_busy_service(), world.service)


async def test_every_own_answer_is_as_described(client: Client) -> None:
    assert (await client("GET", "/health"))["starting"] == {"warming up": 1}
    engines = (await client("GET", "/v1/engines"))["data"]
    assert [one["load"] is None for one in engines] == [True, False, True]
    assert ["sms" in one for one in engines] == [False, False, True]
    assert {one["targets"][0] for one in await client("GET", "/metrics/targets")} == {
        one["url"].removeprefix("http://") for one in engines
    }
    for headers in ({}, ANTHROPIC):
        listed = await client("GET", "/v1/models", headers=headers)
        path = f"/v1/models/{listed['data'][0]['id']}"
        assert await client("GET", path, headers=headers) == listed["data"][0]
    listed = await client("GET", "/v1/conversations")
    assert (listed["object"], listed["total"], len(listed["data"])) == ("list", 2, 2)
    shown = await client("GET", CONVERSATION)
    assert [one["tool"] for one in shown["histories"][0]["running_tools"]] == ["bash"]
    assert {"place", "tool_start"} <= {one["kind"] for one in shown["events"]}
    (cause,) = (await client("GET", "/v1/cache"))["causes"]
    assert (cause["cause"], cause["tokens"], cause["example"]) == ("first", 100, "a/b")
    recording = await client("GET", "/v1/recording")
    assert (recording["model"], recording["turns"]) == ("conserve-embedded", [])
    ended = {"event": "end", "tool": "bash", "call_id": "call 1"}
    assert await client("POST", CONVERSATION + "/tools", json=ended) == {"running_tools": 0}

    made = await client("POST", ENVIRONMENTS, json={"limits": {"wall_s": 30}})
    assert made["state"] == "declared"
    assert await client("GET", ENVIRONMENTS) == {"object": "list", "data": [made]}
    assert await client("GET", ENVIRONMENTS + "/main") == made
    done = await client("POST", ENVIRONMENTS + "/main/run", json={"command": "echo ok"})
    assert (done["stdout"], done["exit_code"]) == ("ok\n", 0)
    gone = {"id": "main", "object": "environment.deleted", "deleted": True}
    assert await client("DELETE", ENVIRONMENTS + "/main") == gone

    await client("POST", "/v1/engines/nowhere/drain", 404, json={})
    draining = await client("POST", "/v1/engines/d/drain", json={})
    assert (draining["id"], draining["object"]) == ("d", "engine.draining")

    ended = {"id": "a/b", "object": "conversation.deleted", "deleted": True}
    assert await client("DELETE", CONVERSATION) == ended
    for there in (True, False):
        released = await client("POST", "/programs/release", json={"program_id": "c"})
        assert released == {"program_id": "c", "released": there}

    client.door.probes.heard(True)
    assert (await client("GET", "/live"))["status"] == "ok"
    assert (await client("GET", "/ready"))["status"] == "ready"
    assert (await client("GET", "/version"))["model"] == "conserve-embedded"
    assert client.seen | ELSEWHERE == own_operations()


async def test_every_error_is_as_described(client: Client) -> None:
    await client("GET", "/v1/models/other", 404)
    await client("GET", "/v1/conversations?limit=0", 400)
    await client("GET", "/v1/cache?minutes=61", 400)
    await client("GET", "/v1/recording?after=-1", 400)
    await client("GET", "/v1/conversations/other", 404)
    await client("DELETE", "/v1/conversations/other", 404)
    await client("POST", CONVERSATION + "/tools", 400, json={"event": "start"})
    await client("POST", ENVIRONMENTS, 400, json={"ports": 99})
    await client("POST", ENVIRONMENTS, 501, json={"kind": "container", "image": "a"})
    await client("GET", ENVIRONMENTS + "/other", 404)
    await client("POST", "/v1/messages", 400, json={})
    for unnamed in ({}, {"program_id": "a\nb"}):
        await client("POST", "/programs/release", 400, json=unnamed)
    await client("GET", "/v1/messages", 405)
    await client("GET", "/nowhere", 404)
    assert "starting" in (await client("GET", "/ready", 503))["reason"]


async def test_an_application_without_engines_is_not_healthy(world: World) -> None:
    service = await Drive.of()
    service._recovery.complete.set()
    client = Client(service, world.service)
    health = {"status": "unavailable", "prefillers": 0, "decoders": 0}
    assert await client("GET", "/health", 503) == health
