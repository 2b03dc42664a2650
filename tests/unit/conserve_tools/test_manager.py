"""The manager with real processes, and its actor's body with a table that says what it is told."""

import asyncio
from typing import Any

import pytest

from conserve_tools import manager as managers
from conserve_tools import service as services
from conserve_tools.root import make_root
from conserve_tools.sandbox import marked
from conserve_tools.service import cpu_pressure
from deployments.messages import Refusal, Standing
from tests.unit.conserve_tools.world import World

LIVE = Standing("live")


async def run(world: World, conversation: str = "a", **body: Any) -> Any:
    body.setdefault("command", "cat file")
    return await world.service.run(f"run-{conversation}-{body}", conversation, "main", body)


async def test_prepared_when_it_is_needed_soon(world: World) -> None:
    made = await world.service.declare("a", {"setup": "echo made > file"})
    assert made.state == "declared"
    await asyncio.sleep(0.3)
    assert world.folders() == []
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


async def test_a_folder_that_is_nobodys_is_removed(world: World) -> None:
    make_root(world.root)
    (world.root / "77" / "home").mkdir(parents=True)
    await world.service.declare("a", {})
    assert world.folders() == []


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


async def test_commands_wait_for_their_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers, "RUNNING", 1)
    monkeypatch.setattr(managers, "WAITING", 1)
    await world.service.declare("a", {})
    await run(world, command="true")
    asks = [run(world, command=f"sleep 0.5; echo {n}") for n in range(3)]
    answers = await asyncio.gather(*asks)
    refused = [one for one in answers if isinstance(one, Refusal)]
    assert [one.code for one in refused] == ["too_many_commands"]


async def test_one_manager_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.service.declare("a", {})
    other = world._new()
    monkeypatch.setattr(services, "_START_S", 0.3)
    refused = await other.declare("b", {})
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


@pytest.mark.parametrize(
    ("stalls", "load", "share"),
    [
        ("some avg10=12.50 avg60=3 avg300=1 total=9\nfull avg10=1.00", 0.0, 0.125),
        ("", 8.0, 0.5),
        ("", 2.0, 0.0),
    ],
)
def test_pressure_is_what_linux_says_or_else_the_load(
    stalls: str, load: float, share: float
) -> None:
    assert cpu_pressure(stalls, load, cores=4) == share
