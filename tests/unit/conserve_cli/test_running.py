"""`conserve top`, `ps`, `end` and `drain` ask an application, and show its answers."""

import asyncio
import io
import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar, NamedTuple

import httpx
import msgspec
import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from conserve.placement import EngineLoad
from conserve.turn import TurnStats
from conserve_cli.main import cli
from conserve_cli.running import (
    Seen,
    Unanswered,
    conversations_table,
    next_screen,
    quantile,
    read_samples,
    screen,
)
from deployments import answers
from tests.unit.deployments.table.test_draining import a_service


class _Told(NamedTuple):
    """Answers of a table that holds a few conversations."""

    engines: bytes
    conversations: bytes
    metrics: str
    cache: bytes

    def seen(self) -> Seen:
        listed = json.loads(self.conversations)
        engines = json.loads(self.engines)["data"]
        return Seen(0.0, engines, listed["data"], listed["total"], read_samples(self.metrics))


async def _told() -> _Told:
    service = await a_service()
    for name, turns in (("agent-1", 2), ("agent-2", 1), ("agent-3", 1), ("agent-4", 1)):
        for _ in range(turns):
            plan = await service.turn(name, ends=True)
            await service.observe(
                plan.turn,
                TurnStats(outcome="completed", latency_s=1.0, ttft_s=0.3, effective_ago_s=0.5),
            )
    # Its client has left: its decoder tells of it, and then its router.
    cut = await service.turn("agent-5")
    service._running.abandon(cut.turn, cut.decoder_id, TurnStats(120, 5, client="agent"))
    await service.abandon(cut.turn)
    await service.release("agent-5")
    await service.beat("d#0", load=EngineLoad(prefill_tokens=512, decodes=3))
    await service.drain("d#1")
    engines = msgspec.json.encode(answers.Engines(await service.engines()))
    metrics, cache = (await service.metrics()).decode(), msgspec.json.encode(await service.cache(5))
    return _Told(engines, await service.conversations(1000), metrics, cache)


@pytest.fixture
def told() -> _Told:
    return asyncio.run(_told())


class _Application(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str, str | None]]] = []
    answers: ClassVar[dict[str, bytes]] = {}

    def _answer(self) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization")))
        body = self.answers.get(self.path.partition("?")[0])
        if self.command == "POST" and self.headers.get("Content-Type") != "application/json":
            body = None  # As `deployments.router.guard` refuses it.
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write(body or b'{"error": {"message": "there is no such thing"}}')

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url(told: _Told) -> Iterator[str]:
    _Application.asked = []
    _Application.answers = {
        "/v1/engines": told.engines,
        "/v1/conversations": told.conversations,
        "/metrics": told.metrics.encode(),
        "/v1/cache": told.cache,
        "/v1/conversations/a%2Fb": b'{"deleted": true}',
        "/v1/engines/d%231/drain": b'{"conversations": 2}',
    }
    server = HTTPServer(("127.0.0.1", 0), _Application)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def called(*arguments: str, key: str | None = None) -> tuple[int, str]:
    done = CliRunner(env={"CONSERVE_API_KEY": key, "COLUMNS": "160"}).invoke(cli, arguments)
    return done.exit_code, done.output


def test_top_shows_engines_by_conversation_and_what_is_slow(url: str) -> None:
    status, shown = called("top", url)
    assert status == 0, shown
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ d")}
    assert "0 %" in rows["d#1"]
    assert "decoder (leaving)" in shown
    assert "512" in rows["d#0"]
    assert "220 of 1,000: agent-4 110, agent-1 110" in shown
    assert "4 conversations" in shown
    assert "Waiting: none" in shown
    assert "median TTFT 0." in shown
    # A later turn found nothing of what the first had left.
    assert re.search(r"agent-1: evicted while idle for \d+\.\d s \(100 tokens computed\)", shown)


def test_ps_lists_conversations(url: str) -> None:
    status, shown = called("ps", url, key="secret")
    assert status == 0, shown
    assert {"agent-1", "agent-2", "agent-3", "agent-4"} <= set(shown.split())
    assert _Application.asked == [("GET", "/v1/conversations?limit=1000", "Bearer secret")]
    assert "secret" not in shown


def test_ps_lists_children_below_their_parents(told: _Told) -> None:
    one, *_ = json.loads(told.conversations)["data"]
    families = {"child": ("parent", ["b"]), "parent": ("gone", ["child"]), "b": ("child", [])}
    families |= {"x": ("y", ["y"]), "y": ("x", ["x"])}
    listed = [
        {**one, "id": name, "parent": parent, "children": children}
        for name, (parent, children) in families.items()
    ]
    rows = text_of(conversations_table(listed)).splitlines()
    shown = [row.split("│")[1].rstrip() for row in rows if row.startswith("│")]
    assert shown == [" parent", " └ child", "   └ b", " x", " └ y"]


def test_cache_says_why_tokens_were_computed_and_what_to_do(url: str) -> None:
    status, shown = called("cache", url, "--minutes", "5")
    assert status == 0, shown
    assert "last 5 min: 620 prompt tokens computed, 100 of them again" in shown
    assert re.search(r"evicted while idle │ +100 │ 16.1% │ +0.0 │ +1 │ agent-1 ", shown)
    assert "evicted while idle: Set lmcache.size_gb higher" in shown
    # No line is padded to the width of a pipe, which has none.
    assert "  agent: first turn 120\n" in shown
    assert _Application.asked[0][1] == "/v1/cache?minutes=5"
    assert json.loads(called("cache", url, "--json")[1])["again_tokens"] == 100
    assert "joules" not in shown


def test_joules_of_a_cause_are_shown_where_they_are_known(url: str) -> None:
    answer = json.loads(_Application.answers["/v1/cache"])
    answer["causes"][0]["joules"] = 1234.5
    _Application.answers["/v1/cache"] = json.dumps(answer).encode()
    _, shown = called("cache", url)
    assert re.search(r"share ┃ seconds ┃ joules ┃ turns", shown)
    assert re.search(r"first turn +│ +520 │ 83.9% │ +0.0 │ +1,234 │ +5", shown)
    assert re.search(r"evicted while idle │ +100 │ 16.1% │ +0.0 │ +│ +1", shown)


def test_ids_are_quoted(url: str) -> None:
    assert called("end", "a/b", url, "--tenant", "x y") == (0, "Ended a/b.\n")
    status, shown = called("drain", "d#1", url)
    assert (status, "move when their turns end: 2." in shown) == (0, True)
    assert [one[:2] for one in _Application.asked] == [
        ("DELETE", "/v1/conversations/a%2Fb?tenant=x%20y"),
        ("POST", "/v1/engines/d%231/drain"),
    ]


@pytest.mark.parametrize("arguments", [("end", "nobody"), ("ps",)])
def test_what_is_refused_is_said_in_a_line(url: str, arguments: tuple[str, ...]) -> None:
    _Application.answers = {}
    assert called(*arguments, url) == (1, "there is no such thing.\n")


def test_no_proxy_is_asked_for_this_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    assert called("ps", url)[0] == 0


def text_of(shown: RenderableType) -> str:
    console = Console(width=160, no_color=True, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_a_server_that_is_lost_while_it_is_watched_is_tried_again(url: str) -> None:
    recent: deque[Seen] = deque()
    with httpx.Client(base_url=url) as client, httpx.Client(base_url="http://127.0.0.1:1") as gone:
        recent.append(Seen(time.monotonic(), [], [], 7, {}))
        lost = text_of(next_screen(gone, recent))
        assert "No ConServe application answers at http://127.0.0.1:1" in lost
        assert "trying again" in lost
        # The last that was seen of it.
        assert "7 conversations" in lost
        found = text_of(next_screen(client, recent))
        assert "4 conversations" in found
        assert "trying again" not in found
        _Application.answers = {}
        with pytest.raises(Unanswered, match="there is no such thing"):
            next_screen(client, recent)


def test_an_application_that_starts_again_counts_from_its_start(url: str) -> None:
    before = {("conserve_prompt_tokens_total", ""): 1e9}
    recent = deque([Seen(time.monotonic(), [], [], 7, before)])
    with httpx.Client(base_url=url) as client:
        assert "Since its start: median TTFT 0." in text_of(next_screen(client, recent))
        assert "Last " in text_of(next_screen(client, recent))


def test_times_are_of_the_turns_since_the_oldest_look() -> None:
    def samples(*counts: int) -> dict[tuple[str, str], float]:
        lines = [
            f'conserve_ttft_seconds_bucket{{le="{le}"}} {count}'
            for le, count in zip(("0.1", "1.0", "+Inf"), counts, strict=True)
        ]
        return read_samples("\n".join(["# TYPE conserve_ttft_seconds histogram", *lines, ""]))

    old, new = samples(100, 100, 100), samples(100, 110, 110)
    assert quantile(old, new, "conserve_ttft_seconds", 0.5) == pytest.approx(0.55)
    assert quantile(new, new, "conserve_ttft_seconds", 0.5) is None
    assert quantile({}, samples(0, 0, 4), "conserve_ttft_seconds", 0.5) == 1.0


def test_a_slow_turn_is_shown_once_and_also_when_another_has_followed(told: _Told) -> None:
    slow = told.seen()
    assert text_of(screen([slow, slow, slow._replace(conversations=[])])).count("evicted") == 1
