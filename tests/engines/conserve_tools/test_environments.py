"""Environments of live conversations: they run tools, and go when their conversation does."""

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from conserve.settings import Settings
from conserve_tools.root import folder_of, folders
from conserve_tools.sandbox import marked
from conserve_tools.service import UNCLAIMED_S
from tests.checkout import ROOT as CHECKOUT
from tests.engines.applications import TOOLS
from tests.engines.client import Agent
from tests.engines.processes import kill, processes
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(TOOLS)]

ROOT = folder_of(Settings())


def of(application: str, conversation: str) -> str:
    return f"{application}/v1/conversations/{conversation}/environments"


async def asked(client: httpx.AsyncClient, url: str, **body: Any) -> dict[str, Any]:
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def nothing_left(timeout_s: float = 40) -> None:
    await eventually("no folder is left", lambda: not [*folders(ROOT)], timeout_s)
    assert not marked(f"{ROOT}:")


async def test_a_conversation_has_its_tools_as_long_as_it_lives(
    application: str, client: httpx.AsyncClient
) -> None:
    """Declared before it begins, prepared when it is bound, gone when it is ended."""
    agent = Agent(client, "fix-42")
    url = of(application, "fix-42")
    made = await asked(client, url, ports=1, setup="echo from setup > note")
    assert (made["state"], made["ports"]) == ("declared", [])
    await agent.say("open the file, please", tokens=8)
    # Nobody has asked for it yet.
    for _ in range(100):
        shown = (await client.get(f"{url}/main")).json()
        if shown["state"] == "ready":
            break
        await asyncio.sleep(0.1)
    assert shown["state"] == "ready", shown
    (port,) = shown["ports"]
    done = await asked(client, f"{url}/main/run", command="cat note; cat; echo $PORT", stdin="in\n")
    assert done["stdout"] == f"from setup\nin\n{port}\n"
    assert (done["exit_code"], done["isolation"]) == (0, shown["isolation"])
    await agent.say("and now?", tokens=8)
    conversation = (await client.get(f"{application}/v1/conversations/fix-42")).json()
    states = [one["state"] for one in conversation["events"] if one["kind"] == "environment"]
    assert states == ["ready", "ran"]
    await client.delete(f"{application}/v1/conversations/fix-42")
    await nothing_left()
    assert (await client.get(f"{url}/main")).status_code == 404


async def test_what_nobody_came_for_is_removed(application: str, client: httpx.AsyncClient) -> None:
    url = of(application, "never")
    await asked(client, url)
    await asked(client, f"{url}/main/run", command="sleep 1")
    assert [*folders(ROOT)]
    await nothing_left(UNCLAIMED_S + 40)


async def test_a_client_that_leaves_ends_its_command(
    application: str, client: httpx.AsyncClient
) -> None:
    url = of(application, "leaves")
    await asked(client, url)
    with pytest.raises(httpx.TimeoutException):
        await client.post(f"{url}/main/run", json={"command": "sleep 50"}, timeout=3)
    await eventually("its command is ended", lambda: not marked(f"{ROOT}:"), 20)
    # One that it may come back for goes on, and is run once.
    named = {"command": "sleep 4; echo ran >> log; cat log", "call_id": "c1"}
    with pytest.raises(httpx.TimeoutException):
        await client.post(f"{url}/main/run", json=named, timeout=2)
    assert (await asked(client, f"{url}/main/run", **named))["stdout"] == "ran\n"
    await client.delete(f"{url}/main")
    await nothing_left()


async def test_the_manager_is_killed_in_mid_run(
    application: str, client: httpx.AsyncClient
) -> None:
    """Its commands end, live conversations keep their files, and what has ended is removed."""
    stays, goes = Agent(client, "stays"), Agent(client, "goes")
    for agent in (stays, goes):
        await agent.say("begin", tokens=4)
        url = of(application, str(agent.id))
        await asked(client, url)
        await asked(client, f"{url}/main/run", command="echo kept > file")
    await asyncio.sleep(2)  # It has asked the table about both.
    (manager,) = processes("ray::EnvironmentService")
    run = of(application, "stays") + "/main/run"
    cut = asyncio.ensure_future(client.post(run, json={"command": "setsid sleep 50 & sleep 50"}))
    await eventually("the command runs", lambda: len(marked(f"{ROOT}:")) >= 3, 20)
    kill(manager.pid)
    await client.delete(f"{application}/v1/conversations/goes")
    answer = await cut
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "command_cut"
    await eventually("its command is ended", lambda: not marked(f"{ROOT}:"), 20)
    done = await asked(client, run, command="cat file")
    assert done["stdout"] == "kept\n"
    await eventually("the other is removed", lambda: len([*folders(ROOT)]) == 1, 40)
    await client.delete(f"{application}/v1/conversations/stays")
    await nothing_left()
    (restarted,) = processes("ray::EnvironmentService")
    assert restarted.pid != manager.pid


async def test_a_table_that_is_restarted_ends_nobody(
    application: str, client: httpx.AsyncClient
) -> None:
    agent = Agent(client, "outlives")
    await agent.say("begin", tokens=4)
    url = of(application, "outlives")
    await asked(client, url)
    await asked(client, f"{url}/main/run", command="echo kept > file")
    (table,) = processes("ray::TableActor")
    kill(table.pid)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 20:
        done = await asked(client, f"{url}/main/run", command="cat file")
        assert done["stdout"] == "kept\n"
        await asyncio.sleep(0.5)
    await agent.say("go on", tokens=4)
    await client.delete(f"{application}/v1/conversations/outlives")
    await nothing_left()


def test_the_journal_says_that_nothing_is_left(application: str) -> None:
    held: set[int] = set()
    for line in (ROOT / "journal").read_text().splitlines():
        entry = json.loads(line)
        if entry["op"] == "declare":
            held.add(entry["number"])
        elif entry["op"] == "removed":
            held.discard(entry["number"])
    assert held == set()


def test_the_example_of_the_docs_works(
    application: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (CHECKOUT / "docs/guides/environments.md").read_text(), re.DOTALL
    )
    exec(example, {})
    assert capsys.readouterr().out == "note.txt\nhello\n"
