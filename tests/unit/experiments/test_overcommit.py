"""The benchmark of agents beyond what engines hold: what it counts, and what it shows."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from experiments import overcommit
from experiments.agents import Shape
from experiments.harness import Experiment
from experiments.overcommit import Level, Watch, draw, pool, report

SHAPE = Shape(first_words=40, later_words=10, output_tokens=5, turns=3)


def usage(prompt: int, cached: int) -> dict[str, object]:
    details = {"cached_tokens": cached}
    return {
        "completion_tokens": 5, "total_tokens": prompt + 5, "prompt_tokens_details": details
    }  # fmt: skip


def test_what_is_found_is_told_of_what_was_sent_before() -> None:
    level = Level(agents=2, seconds=4.0)
    level.add(usage(100, 30), 0, 1.0)  # A first turn repeats nothing.
    assert (level.found, level.tokens_per_s) == (0.0, 1.25)
    level.add(usage(150, 96), 105, 1.0)
    level.add(usage(200, 200), 95, 1.0)
    assert level.found == (96 + 95) / 200
    level.add({"completion_tokens": 5, "prompt_tokens_details": None}, 100, 1.0)
    assert level.found == (96 + 95) / 300


def test_rounds_are_pooled_level_by_level() -> None:
    def level(agents: int, output_tokens: int, refused: dict[int, int]) -> Level:
        return Level(agents, 10.0, output_tokens, 100, 50, refused, [1.0])

    once, four = pool([[level(6, 20, {}), level(25, 40, {429: 1})],
                       [level(6, 40, {}), level(25, 80, {429: 2, 503: 1})]])  # fmt: skip
    assert (once.agents, once.tokens_per_s, once.found) == (6, 3.0, 0.5)
    assert (four.agents, four.tokens_per_s, four.latency_s) == (25, 6.0, [1.0, 1.0])
    assert four.refused == {429: 3, 503: 1}


class Server:
    """Answers like a model that finds half of what was sent before, and refuses now and then."""

    def __init__(self) -> None:
        self.conversations: dict[str, list[int]] = {}
        self.asked = 0
        self.fails = False

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.fails:
            return web.Response(text="no JSON")
        if self.asked % 7 == 0:
            return web.json_response({"error": {"code": "queue_full"}}, status=429)
        body = await request.json()
        turns = self.conversations.setdefault(request.headers["X-Conversation-Id"], [])
        tokens = sum(len(one["content"].split()) for one in body["messages"])
        found = usage(tokens, (turns[-1] + 5) // 2 if turns else 0)
        turns.append(tokens)
        message = {"role": "assistant", "content": "one two three four five"}
        return web.json_response({"choices": [{"message": message}], "usage": found})


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overcommit, "_RETRY_S", 0.001)


async def run(server: Server, counts: list[int]) -> list[Level]:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        watch = Watch(SHAPE, gap_s=0.002)
        return [
            await watch.measure(url, "X-Conversation-Id", count, 0.05, 0.5, 1) for count in counts
        ]
    finally:
        await runner.cleanup()


@pytest.mark.usefixtures("retries_at_once")
def test_agents_make_their_turns_and_begin_anew() -> None:
    server = Server()
    levels = asyncio.run(run(server, [2, 5]))
    assert [level.agents for level in levels] == [2, 5]
    for level in levels:
        assert level.latency_s
        assert level.output_tokens == 5 * len(level.latency_s)
        assert level.found == pytest.approx(0.5, abs=0.05)
        assert set(level.refused) == {429}
    made = server.conversations
    assert len(made) > 7
    assert max(map(len, made.values())) == SHAPE.turns
    # What is sent grows by the answer, and by what is new.
    assert {tuple(turns) for turns in made.values() if len(turns) == 3} == {(40, 55, 70)}


def test_an_agent_that_fails_ends_the_run() -> None:
    server = Server()
    server.fails = True
    with pytest.raises((ValueError, aiohttp.ClientError)):
        asyncio.run(run(server, [2]))


def test_the_table_and_the_picture_show_each_system(tmp_path: Path) -> None:
    def levels(*tokens: int) -> list[Level]:
        return [
            Level(6 * (n + 1), 10.0, one, 100, 90 - 10 * n, {429: n}, [0.5, 1.0, 2.0])
            for n, one in enumerate(tokens)
        ]

    found = {"conserve": levels(1000, 950), "vllm": levels(1000, 0)}
    experiment = Experiment("overcommit", None)
    experiment.console = console = Console(width=110, record=True)
    report(found, 12_288, experiment)
    shown = console.export_text()
    assert "12,288 tokens" in shown
    (second,) = (line for line in shown.splitlines() if " 95.0 " in line)
    assert "0.95" in second
    assert "80.0%" in second
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    # A system of which nothing came is shown, too.
    report({"vllm": [Level(6, 10.0)]}, 12_288, experiment)
