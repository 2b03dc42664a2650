"""The manager with real processes, and its actor's body with a table that says what it is told."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from conserve.settings import EnvironmentSettings, Settings
from conserve_tools import manager as managers
from conserve_tools import service as services
from conserve_tools.root import folders, make_root
from conserve_tools.sandbox import marked
from conserve_tools.service import EnvironmentService
from deployments.messages import HostPressure, Lifecycle, Refusal, Standing
from tests.unit.deployments.stub_table import StubTable

LIVE = Standing("live")


class Table(StubTable):
    """Says of conversations what it is told to."""

    def __init__(self) -> None:
        self.life = 1
        self.live: dict[str, Standing] | None = {}
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.pressure = HostPressure()

    async def call(self, method: str, asked: list[str], pressure: HostPressure) -> Any:
        assert method == "lifecycle"
        self.pressure = pressure
        live = None if self.live is None else {c: s for c, s in self.live.items() if c in asked}
        return Lifecycle(self.life, live)

    def tell(self, method: str, *told: Any) -> None:
        assert method == "note"
        self.told.append(told)  # type: ignore[arg-type]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="conserve-test-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder) / "root"


class World:
    """A service, which may be followed by another one."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        asked = {"enabled": True, "root": str(root), "isolation": "limits", **settings}
        self.settings = Settings(environments=EnvironmentSettings(**asked))
        self.table = Table()
        self.service = self._new()

    def _new(self) -> EnvironmentService:
        made = EnvironmentService(self.settings, "test", "1")
        made._table = self.table  # type: ignore[assignment]
        return made

    async def die(self) -> None:
        """As by ``kill -9``: nothing is said to anybody, and launchers see their pipes closed."""
        service = self.service
        assert service._housekeeping is not None
        service._housekeeping.cancel()
        manager = service._manager
        assert manager is not None
        for commands in list(manager._commands.values()):
            for command in list(commands):
                command.cut()
        for job in list(manager._jobs.values()):
            job.cancel()
        assert service._journal is not None
        service._journal.close()
        services_lock_released(service)
        self.service = self._new()

    async def until(self, holds: Any) -> None:
        for _ in range(200):
            if holds():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it does not come to pass")

    def folders(self) -> list[str]:
        return [path.name for path in folders(self.root)]

    def kinds(self) -> list[tuple[str, Any]]:
        return [(kind, said.get("state")) for kind, _, said in self.table.told]


def services_lock_released(service: EnvironmentService) -> None:
    """The kernel would, with the process."""
    assert service._lock is not None
    os.close(service._lock)


def _without_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask none of this machine's daemons, which may take long to answer."""
    monkeypatch.setattr("conserve_tools.backends.shutil.which", lambda name: None)


@pytest.fixture
async def world(
    root: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> AsyncIterator[World]:
    monkeypatch.setattr(services, "BEAT_S", 0.05)
    _without_containers(monkeypatch)
    made = World(root)
    yield made
    manager = made.service._manager
    if made.service._housekeeping is not None:
        made.service._housekeeping.cancel()
    if manager is not None:
        await manager.close()
    assert made.folders() == []
    assert marked(f"{root}:") == []


async def run(world: World, conversation: str = "a", **body: Any) -> Any:
    body.setdefault("command", "cat file")
    return await world.service.run(f"run-{conversation}-{body}", conversation, "main", body)


async def test_prepared_when_it_is_needed_soon(world: World) -> None:
    made = await world.service.declare("a", {"setup": "echo made > file"})
    assert made.state == "declared"
    await asyncio.sleep(0.3)
    assert world.folders() == []
    assert world.table.live is not None
    world.table.live["a"] = Standing("waiting", 0)
    await world.until(lambda: ("environment", "ready") in world.kinds())
    assert (await run(world)).stdout == "made\n"
    kinds = [kind for kind, _ in world.kinds()]
    assert kinds == ["environment", "environment"]
    assert world.table.told[1][2]["exit_code"] == 0
    world.table.live.clear()
    await world.until(lambda: ("environment", "removed") in world.kinds())
    assert world.folders() == []
    assert (await world.service.shown("a", "main")).status == 404


async def test_a_setup_that_fails(world: World) -> None:
    await world.service.declare("a", {"setup": "echo no such thing >&2; exit 3"})
    refused = await run(world)
    assert isinstance(refused, Refusal)
    assert refused.code == "environment_failed"
    assert "no such thing" in refused.message
    assert (await world.service.listed("a"))[0].state == "failed"
    await world.service.let_go("a", "main")
    await world.until(lambda: not world.folders())
    await world.service.declare("a", {})
    assert (await run(world, command="echo ok")).stdout == "ok\n"


async def test_it_is_killed_and_followed(world: World) -> None:
    assert world.table.live is not None
    world.table.live |= {"a": LIVE, "b": LIVE}
    for name in ("a", "b"):
        await world.service.declare(name, {})
        await run(world, name, command="echo kept > file")
    await world.until(lambda: all(one.holders for one in world.service._manager.ledger))
    await asyncio.sleep(0.2)
    cut = asyncio.ensure_future(run(world, command="setsid sleep 600 & sleep 600"))
    await world.until(lambda: len(marked(f"{world.root}:")) >= 3)
    await world.die()
    del world.table.live["b"]
    assert (await run(world)).stdout == "kept\n"
    await world.until(lambda: world.folders() == ["1"])
    await world.until(lambda: not marked(f"{world.root}:"))
    await cut


async def test_a_folder_that_is_nobodys_is_removed(world: World) -> None:
    make_root(world.root)
    (world.root / "77" / "home").mkdir(parents=True)
    await world.service.declare("a", {})
    assert world.folders() == []


async def test_a_table_that_does_not_know_yet_ends_nobody(world: World) -> None:
    assert world.table.live is not None
    world.table.live["a"] = LIVE
    await world.service.declare("a", {})
    await run(world, command="echo kept > file")
    await asyncio.sleep(0.2)
    world.table.life, world.table.live = 2, None
    await asyncio.sleep(0.3)
    world.table.live = {}
    await asyncio.sleep(0.3)
    assert (await run(world)).stdout == "kept\n"
    world.table.live = {"a": LIVE}
    await asyncio.sleep(0.3)
    world.table.live = {}
    await world.until(lambda: not world.folders())


async def test_a_call_is_carried_out_once(world: World) -> None:
    await world.service.declare("a", {})
    named = {"command": "echo ran >> file; sleep 0.5; cat file", "call_id": "c"}
    asks = [world.service.run(f"r{n}", "a", "main", named) for n in range(3)]
    answers = await asyncio.gather(*asks)
    assert {one.stdout for one in answers} == {"ran\n"}
    assert (await run(world, command="cat file")).stdout == "ran\n"


async def test_whoever_leaves_ends_the_command(world: World) -> None:
    await world.service.declare("a", {})
    asking = asyncio.ensure_future(
        world.service.run("r", "a", "main", {"command": "setsid sleep 600 & sleep 600"})
    )
    await world.until(lambda: len(marked(f"{world.root}:")) >= 3)
    await world.until(lambda: world.table.pressure.running_tools == 1)
    await world.service.cut("r")
    await asking
    await world.until(lambda: not marked(f"{world.root}:"))
    await world.until(lambda: world.table.pressure.running_tools == 0)


async def test_commands_wait_for_their_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "BEAT_S", 0.05)
    _without_containers(monkeypatch)
    monkeypatch.setattr(managers, "RUNNING", 1)
    monkeypatch.setattr(managers, "WAITING", 1)
    world = World(root)
    await world.service.declare("a", {})
    await run(world, command="true")
    asks = [run(world, command=f"sleep 0.5; echo {n}") for n in range(3)]
    answers = await asyncio.gather(*asks)
    refused = [one for one in answers if isinstance(one, Refusal)]
    assert [one.code for one in refused] == ["too_many_commands"]
    assert world.service._manager is not None
    assert world.service._housekeeping is not None
    world.service._housekeeping.cancel()
    await world.service._manager.close()


async def test_one_manager_at_a_time(world: World) -> None:
    await world.service.declare("a", {})
    other = world._new()
    monkeypatched = pytest.MonkeyPatch()
    monkeypatched.setattr(services, "_START_S", 0.3)
    try:
        refused = await other.declare("b", {})
    finally:
        monkeypatched.undo()
    assert refused.status == 503
    assert "another application manages" in refused.message
    assert other._housekeeping is not None
    other._housekeeping.cancel()


async def test_what_cannot_be_had(world: World) -> None:
    for body, code in (
        ({"ports": 99}, "invalid_environment"),
        ({"kind": "container", "image": "python"}, "environment_not_supported"),
    ):
        assert (await world.service.declare("a", body)).code == code
    await world.service.declare("a", {})
    assert (await world.service.declare("a", {"ports": 1})).code == "environment_exists"
    assert (await run(world, command="")).code == "invalid_command"
    assert (await world.service.run("r", "b", "main", {"command": "id"})).status == 404
