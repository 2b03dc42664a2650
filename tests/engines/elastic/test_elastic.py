"""Under `placement: elastic` a prefiller hosts conversations, too, and engines say their load."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.engines.applications import ELASTIC
from tests.engines.client import Agent, Reply, chat, engines, lone_answer, prose
from tests.engines.lone import LONE_PORT
from tests.engines.metrics import exposed, metric
from tests.engines.processes import kill, processes
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(ELASTIC)]

OUTPUT_TOKENS = 16
# With prompts of so many words: more than one engine has room for, and no more than both have.
_MOST_AGENTS = 20
_WORDS = 400


def engine(role: str) -> dict[str, Any]:
    (found,) = engines(role)
    return found


async def on_both(
    client: httpx.AsyncClient, rng: random.Random, name: str
) -> tuple[list[Agent], list[Agent]]:
    """Begin conversations, some at a time, until both engines have two: the prefiller's, the rest.

    The decoder alone has no room for as many as are begun at most.
    """
    prefiller = engine("prefiller")["id"]
    agents: list[Agent] = []
    while len(agents) < _MOST_AGENTS:
        more = [Agent(client, f"{name}-{len(agents) + n}") for n in range(4)]
        await asyncio.gather(*(one.say(prose(rng, _WORDS), tokens=OUTPUT_TOKENS) for one in more))
        agents += more
        hosted = [one for one in agents if one.replies[0].decoder == prefiller]
        others = [one for one in agents if one not in hosted]
        if min(len(hosted), len(others)) >= 2:
            return hosted, others
    raise AssertionError(f"of {len(agents)} conversations the prefiller hosts {len(hosted)}")


async def answered_alike(client: httpx.AsyncClient, agents: list[Agent], turn: int) -> None:
    """The answers are those of an engine that knows nothing of ConServe."""
    for agent in agents:
        asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
        assert await lone_answer(client, asked, OUTPUT_TOKENS) == answer["content"], agent.id


async def test_both_engines_host(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    hosted, others = await on_both(client, rng, "hosted")
    agents = [*hosted, *others]
    both = engines()
    assert [one["hosts"] for one in both] == [True, True]
    assert sum(one["conversations"] for one in both) == len(agents)
    assert engine("prefiller")["conversations"] == len(hosted)
    assert engine("prefiller")["held_tokens"] > 0
    health = (await client.get(application + "/health")).json()
    assert (health["prefillers"], health["decoders"]) == (1, 1)
    await asyncio.gather(*(one.say("go on", tokens=OUTPUT_TOKENS) for one in agents))
    for one in agents:
        # Each where its history is, and from there.
        assert one.replies[1].decoder == one.replies[0].decoder
        assert one.stats[1]["decoder_cached_tokens"] >= one.stats[0]["prompt_tokens"] // 128 * 128
    for turn in range(2):
        await answered_alike(client, hosted[:2] + others[:2], turn)
    # It keeps responses, too.
    guest = hosted[0]
    asked = {
        "model": "conserve-embedded",
        "input": [*guest.messages, {"role": "user", "content": "in other words"}],
        "max_output_tokens": 4,
    }
    headers = {"X-Conversation-Id": str(guest.id)}
    kept = await client.post(application + "/v1/responses", json=asked, headers=headers)
    assert kept.headers["x-conserve-decoder"] == engine("prefiller")["id"]
    found = await client.get(f"{application}/v1/responses/{kept.json()['id']}")
    assert found.status_code == 200, found.text


async def test_engines_have_tried_what_handing_over_costs_and_caches_find(application: str) -> None:
    for one in engines():
        assert set(one["handoff_s"]) == {"300", "1500"}, one
        assert min(one["handoff_s"].values()) > 0, one
        check = one["cache_check"]
        found = [check[f"{name}_tokens"] for name in ("sent", "again", "appended", "host")]
        assert found == [392, 384, 384, 384], one
        assert check["problem"] == ""


async def test_idle_engines_hand_nothing_over(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    await nothing_is_left_to_do()
    handed_over = metric("conserve_cold_prefills_total")
    for number in range(4):
        await Agent(client, f"alone-{number}").say(prose(rng, _WORDS), tokens=OUTPUT_TOKENS)
        await nothing_is_left_to_do()
    assert metric("conserve_cold_prefills_total") == handed_over


async def nothing_is_left_to_do() -> None:
    def idle() -> bool:
        loads = [one["load"] for one in engines()]
        return all(it and not it["prefill_tokens"] and not it["decodes"] for it in loads)

    await eventually("nothing is left to do", idle, 10)


async def tell(talkers: list[Agent], rng: random.Random) -> "list[asyncio.Task[Reply]]":
    """Long answers under way on the home of these agents, and on no other engine; and counted."""
    began = [asyncio.Event() for _ in talkers]
    for talker in talkers:
        talker.messages.append({"role": "user", "content": prose(rng, 40)})
    telling = [
        asyncio.create_task(talker.ask(tokens=1600, stream=True, began=event))
        for talker, event in zip(talkers, began, strict=True)
    ]
    for event in began:
        await asyncio.wait_for(event.wait(), 60)
    home = talkers[0].replies[-1].decoder

    await eventually(
        "decodes are counted",
        lambda: all(it["load"]["decodes"] == len(talkers) * (it["id"] == home) for it in engines()),
        10,
    )
    return telling


async def remain(
    client: httpx.AsyncClient, application: str, agents: list[Agent], count: int
) -> list[Agent]:
    """So many that have one home; the others' conversations end."""
    homes = [one.replies[-1].decoder for one in agents]
    home = max(homes, key=homes.count)
    kept = [one for one in agents if one.replies[-1].decoder == home][:count]
    for one in (one for one in agents if one not in kept):
        await client.delete(f"{application}/v1/conversations/{one.id}")
    await nothing_is_left_to_do()
    return kept


async def test_a_prompt_goes_where_fewer_answers_wait_for_it_and_loads_are_told(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    await nothing_is_left_to_do()
    hosted, others = await on_both(client, rng, "talks")
    busy = await remain(client, application, [*hosted, *others], 2)
    telling = await tell(busy, rng)
    agent = Agent(client, "cold")
    await agent.say(prose(rng, 1300), tokens=OUTPUT_TOKENS)
    quiet = agent.replies[0].decoder
    assert quiet != busy[0].replies[0].decoder, [one.done() for one in telling]
    await eventually(
        "prefills are timed",
        lambda: (by_id(quiet)["load"]["prefill_tokens_per_s"] or 0) > 0,
        10,
    )
    assert metric("conserve_engine_prefill_tokens_per_second", engine=quiet) > 0
    assert by_id(busy[0].replies[0].decoder)["load"]["step_s"] is not None
    for told in await asyncio.gather(*telling):
        assert told.status == 200
    await eventually(
        "nothing is left to do",
        lambda: metric("conserve_engine_decodes", exposed(application)) == 0,
        10,
    )
    await answered_alike(client, [agent], 0)


def by_id(name: str) -> dict[str, Any]:
    (found,) = (one for one in engines() if one["id"] == name)
    return found


async def test_a_turn_leaves_a_busy_home_and_takes_its_history_along(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Answers under way there do not wait for what the turn appends."""
    stage.wait_for_lone()
    await nothing_is_left_to_do()
    # However they are divided, both engines are over half full, so that turns leave copies.
    agents = [Agent(client, f"appends-{n}") for n in range(_MOST_AGENTS)]
    await asyncio.gather(*(one.say(prose(rng, 430), tokens=OUTPUT_TOKENS) for one in agents))
    await asyncio.sleep(2)  # Engines hear of that with the next beat.
    await asyncio.gather(*(one.say("go on", tokens=OUTPUT_TOKENS) for one in agents))
    # With three left there is room for all that follows.
    agent, *busy = agents = await remain(client, application, agents, 3)
    telling = await tell(busy, rng)
    paused = metric("conserve_pauses_total", reason="load")
    await agent.say(prose(rng, 1000), tokens=OUTPUT_TOKENS)
    quiet = agent.replies[2].decoder
    assert quiet != agent.replies[1].decoder, [one.done() for one in telling]
    assert metric("conserve_pauses_total", reason="load") == paused + 1
    there = agent.stats[2]["lmcache_tokens"] + agent.stats[2]["decoder_cached_tokens"]
    assert there >= agent.stats[1]["prompt_tokens"] // 128 * 128
    for told in await asyncio.gather(*telling):
        assert told.status == 200
    # Now it lives there, and goes on straight.
    direct = metric("conserve_later_turns_total", way="direct")
    await agent.say("go on", tokens=OUTPUT_TOKENS)
    assert agent.replies[3].decoder == quiet
    assert agent.stats[3]["decoder_cached_tokens"] >= agent.stats[2]["prompt_tokens"] // 128 * 128
    assert metric("conserve_later_turns_total", way="direct") == direct + 1
    for turn in range(4):
        await answered_alike(client, [agent], turn)
    for one in agents:
        await client.delete(f"{application}/v1/conversations/{one.id}")


async def test_a_new_table_learns_what_the_prefiller_holds(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    hosted, others = await on_both(client, rng, "kept")
    moves = metric("conserve_moves_total")
    (table,) = processes("ray::TableActor")
    kill(table.pid)
    agents = [*hosted, *others]
    await asyncio.gather(*(one.say("go on", tokens=OUTPUT_TOKENS) for one in agents))
    for one in agents:
        assert one.replies[1].decoder == one.replies[0].decoder
        assert one.stats[1]["decoder_cached_tokens"] > 300
    assert engine("prefiller")["conversations"] == len(hosted)
    # Counters begin anew with a table.
    assert metric("conserve_moves_total") in (0, moves)
    listed = (await client.get(application + "/v1/conversations?limit=100")).json()["data"]
    assert {one["id"] for one in listed} == {one.id for one in agents}


@pytest.mark.full
async def test_what_a_lost_prefiller_hosted_goes_on_elsewhere(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    hosted, others = await on_both(client, rng, "lost")
    prefiller, decoder = engine("prefiller"), engine("decoder")
    for one in others[2:]:
        # There has to be room elsewhere.
        await client.delete(f"{application}/v1/conversations/{one.id}")
    moves = metric("conserve_moves_total")
    began = asyncio.Event()
    story, quiet = hosted[0], hosted[1]
    story.messages.append({"role": "user", "content": "a long story, please"})
    telling = asyncio.ensure_future(story.ask(tokens=300, stream=True, began=began))
    await asyncio.wait_for(began.wait(), 60)
    await asyncio.sleep(0.3)
    kill(prefiller["pid"])
    told = await telling
    assert told.status == 200
    assert told.content == await lone_answer(client, story.messages, 300)
    await quiet.say("go on", tokens=OUTPUT_TOKENS)
    for one in others[:2]:
        await one.say("go on", tokens=OUTPUT_TOKENS)
        assert one.replies[1].decoder == decoder["id"]
    assert quiet.replies[1].decoder != prefiller["id"]
    await answered_alike(client, [quiet, *others[:2]], 1)
    assert metric("conserve_moves_total") == moves + 2
    assert metric("conserve_engines_lost_total", role="prefiller") == 1
    await asyncio.to_thread(stage.wait_until_whole)
    assert engine("prefiller")["id"] != prefiller["id"]


async def test_siblings_on_both_engines_begin_from_what_one_of_them_has_computed(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """One engine has no room for all of them."""
    stage.wait_for_lone()
    await nothing_is_left_to_do()
    tools = prose(rng, 1_200)
    children = [Agent(client, f"child-{number}") for number in range(8)]
    for child in children:
        child.messages.append({"role": "system", "content": tools})
    await asyncio.gather(*(child.say(prose(rng, 450), tokens=OUTPUT_TOKENS) for child in children))
    assert len({child.replies[0].decoder for child in children}) == 2
    stats = [child.stats[0] for child in children]
    alone = [{"role": "system", "content": tools}, {"role": "user", "content": ""}]
    reply = await chat(client, alone, tokens=1, url=f"http://127.0.0.1:{LONE_PORT}")
    # Caches and host memory have whole blocks.
    shared = reply.body["usage"]["prompt_tokens"] // 128 * 128
    computed = [
        one["prompt_tokens"] - one["decoder_cached_tokens"] - one["lmcache_tokens"] for one in stats
    ]
    own = sum(one["prompt_tokens"] - shared for one in stats)
    # Once on each engine at most: where loading is dear, the second one computes it, too.
    assert sum(computed) - own <= 2 * shared, stats
    for child in (children[0], children[-1]):
        *asked, answer = child.messages
        assert await lone_answer(client, asked, OUTPUT_TOKENS) == answer["content"], child.id
