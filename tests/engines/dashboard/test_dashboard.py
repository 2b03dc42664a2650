"""The dashboard in Chromium: what real engines do, and a decoder's death, are seen in the page."""

import asyncio
import json
import random
from pathlib import Path

import httpx
import pytest

from tests.engines.applications import MAIN
from tests.engines.client import Agent, engines, prose
from tests.engines.dashboard.chromium import PROGRAM, Page, open_page
from tests.engines.processes import kill, processes
from tests.engines.stage import Stage

pytestmark = [
    pytest.mark.full,
    pytest.mark.application(MAIN, last=True),
    pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (Debian: chromium)"),
]

# It would be an element if the page took it for markup.
MARKUP = '<img src=x onerror=document.title="hit">'
_PHONE = (390, 844)


def lane(conversation: str, **data: str) -> str:
    """An expression for a conversation's lane, with such data; null: it is not there."""
    wanted = {"conversation": conversation, **data}
    return (
        "[...document.querySelectorAll('.lane')].find((one) => !one.hidden && "
        f"Object.entries({json.dumps(wanted)})"
        ".every(([name, value]) => one.dataset[name] === value))"
    )


async def seen(page: Page, conversation: str, **data: str) -> str:
    """Wait for a lane; returns what it says."""
    return str(await page.until(f"{lane(conversation, **data)}?.innerText"))


async def test_a_killed_decoders_conversations_are_seen_to_move(
    application: str,
    stage: Stage,
    client: httpx.AsyncClient,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    async with open_page(tmp_path / "browser", application + "/dashboard") as page:
        await page.until("document.querySelector('#status').dataset.state === 'live'")
        await page.until("document.querySelectorAll('.engine:not([data-gone])').length === 3")

        agents = [Agent(client, name) for name in ("alpha", "beta", "gamma", MARKUP)]
        client.headers["X-ConServe-Parent-Id"] = "alpha"
        for agent in agents:
            await agent.say(prose(rng, 400), tokens=8)
        for agent in agents:
            assert agent.id is not None
            said = await seen(page, agent.id, engine=agent.replies[0].decoder, phase="idle")
            assert agent.id in said
        await seen(page, "gamma", parent="alpha")
        assert await page.value("document.title") == "ConServe"

        lost = agents[0].replies[0].decoder
        (other,) = (one["id"] for one in engines("decoder") if one["id"] != lost)
        doomed = [agent for agent in agents if agent.replies[0].decoder == lost]
        began = asyncio.Event()
        agents[0].messages.append({"role": "user", "content": "a long story, please"})
        story = asyncio.ensure_future(agents[0].ask(tokens=2000, stream=True, began=began))
        await asyncio.wait_for(began.wait(), 60)
        await seen(page, "alpha", engine=lost, phase="decode")
        kill(next(one["pid"] for one in engines("decoder") if one["id"] == lost))

        # The one in mid-answer goes on at the other decoder, and its letter follows.
        card = f".engine[data-engine='{other}']"
        letter = await page.until(f'document.querySelector("{card}").dataset.letter')
        said = await seen(page, "alpha", engine=other, moves="1", phase="decode")
        assert said.split()[0] == letter
        gone = f".engine[data-engine='{lost}'][data-gone=lost]"
        await page.until(f'document.querySelector("{gone}") !== null')
        # Those between turns are bound nowhere until they come back.
        for agent in doomed[1:]:
            assert agent.id is not None
            await seen(page, agent.id, engine="", phase="lost")
            reply = await agent.say("go on", tokens=8)
            await seen(page, agent.id, engine=reply.decoder, moves="1")
        assert (await story).status == 200

        # By the keyboard: its turns, where they ran, and why.
        await page.press("/")
        for character in "alpha":
            await page.press(character)
        await page.until("document.querySelectorAll('.lane:not([hidden])').length === 1")
        await page.press("Escape")
        await page.until("document.activeElement.id === 'names'")
        for _ in range(len(agents)):
            await page.press("j")
            if await page.value(f"{lane('alpha')}.getAttribute('aria-selected') === 'true'"):
                break
        await page.press("Enter")
        await page.until("document.querySelectorAll('#details-family button').length === 3")
        told = await page.until(
            "[...document.querySelectorAll('#details tbody')].map((one) => "
            "[one.dataset.engine, one.innerText]).filter(([, text]) => text.includes('was lost'))"
            # The turn's end comes some moments after its answer's.
            ".filter((_, at, all) => all.some(([, text]) => text.includes('computed there')))"
        )
        assert {other, lost} == {engine for engine, _ in told}, told
        (elsewhere,) = (text for engine, text in told if engine == other)
        assert "computed there" in elsewhere, told
        await page.press("Escape")
        assert await page.value("document.querySelector('#details').hidden")

        await page.size(*_PHONE, dark=True)
        await page.until("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []
    await asyncio.to_thread(stage.wait_until_whole)


async def test_the_page_goes_on_with_the_next_table(
    application: str,
    stage: Stage,
    client: httpx.AsyncClient,
    rng: random.Random,
    tmp_path: Path,
) -> None:
    agent = Agent(client, "before")
    await agent.say(prose(rng, 200), tokens=8)
    async with open_page(tmp_path / "browser", application + "/dashboard") as page:
        await seen(page, "before", engine=agent.replies[0].decoder)
        (table,) = processes("ray::TableActor")
        await page.value(
            "new MutationObserver(() => { window.told = (window.told ?? '') + "
            "document.querySelector('#status-text').textContent }).observe("
            "document.querySelector('#status-text'), {childList: true, characterData: true, "
            "subtree: true})"
        )
        kill(table.pid)
        await page.until("window.told?.includes('being restarted')")
        await agent.say("go on", tokens=8)
        after = Agent(client, "after")
        await after.say(prose(rng, 200), tokens=8)
        await seen(page, "after", engine=after.replies[0].decoder)
        await seen(page, "before", engine=agent.replies[-1].decoder)
        assert await page.until("document.querySelector('#status').dataset.state === 'live'")
    await asyncio.to_thread(stage.wait_until_whole)
