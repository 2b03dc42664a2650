"""A turn's way past engines and table that fail, without either."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from conserve.conversation import TurnKey
from conserve.settings import Settings
from deployments.messages import Prefilled, TurnPlan, Unplaced
from deployments.router.endpoint import TurnEndpoint
from deployments.router.upstream import EngineUnreachable

PROMPT = {"messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Table:
    """Binds each turn to the next decoder, with a prefiller of its own if there are any."""

    prefillers: int = 0
    asked: list[str] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self.asked.append(method)
        turn = self.asked.count("place")
        if method == "begin":
            return Unplaced("c", "http://tokenizer", "tokenizer", 1000, claim=turn + 1)
        if method == "place":
            prefiller = f"p{turn}" if turn <= self.prefillers else None
            url = None if prefiller is None else f"http://{prefiller}"
            key = TurnKey("c", 1, turn)
            return TurnPlan(key, f"d{turn}", f"http://d{turn}", prefiller, url)
        assert method == "engine_lost"
        self.lost.append(arguments[0])
        return None

    def tell(self, method: str, *arguments: Any) -> None:
        self.told.append((method, arguments[0]))


@dataclass
class Engines:
    """Engines by their URL's host.

    Attributes:
        die: those that are gone once they have the prompt.
        gone: those that were gone before.
    """

    die: set[str]
    gone: set[str] = field(default_factory=set)
    served: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)

    def _serve(self, url: str) -> None:
        name = url.removeprefix("http://").partition("/")[0]
        if name in self.gone:
            self.dead.add(name)
            raise EngineUnreachable(f"cannot connect to {name}", had_request=False)
        self.served.append(name)
        if name in self.die:
            self.dead.add(name)
            raise EngineUnreachable(f"{name} is gone")

    async def count_tokens(self, url: str, body: dict[str, Any]) -> list[int]:
        return [1, 2, 3]

    async def prefill(self, url: str, body: dict[str, Any]) -> Prefilled:
        self._serve(url)
        return Prefilled(3, 0)

    async def healthy(self, url: str) -> bool:
        return url.removeprefix("http://") not in self.dead

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator["Whole"]:
        self._serve(url)
        yield Whole()


class Whole:
    """An engine's answer in one piece."""

    status = 200
    content_type = "application/json"
    raw_headers = ((b"Content-Type", b"application/json"),)

    async def read(self) -> bytes:
        return b'{"choices": []}'


def ask(table: Table, engines: Engines) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers and body of the answer to one chat."""
    endpoint = TurnEndpoint(Settings(), table, engines, "router")  # type: ignore[arg-type]
    received = [{"type": "http.request", "body": json.dumps(PROMPT).encode()}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not received:
            await asyncio.Event().wait()
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(endpoint(scope, receive, send))
    start, body = sent
    return start["status"], dict(start["headers"]), json.loads(body["body"])


def test_a_turn_outlives_the_engine_that_it_was_on() -> None:
    table, engines = Table(), Engines(die={"d1"})
    status, headers, _ = ask(table, engines)
    assert status == 200
    assert headers[b"x-conserve-decoder"] == b"d2"
    assert (engines.served, table.lost) == (["d1", "d2"], ["d1"])


def test_a_prompt_that_two_engines_were_lost_with_is_given_to_no_third() -> None:
    table, engines = Table(), Engines(die={f"d{n}" for n in range(1, 9)})
    status, headers, body = ask(table, engines)
    assert engines.served == ["d1", "d2"]
    assert (status, body["error"]["code"]) == (500, "engines_lost")
    # OpenAI's clients would send it again, twice, on any other 5xx.
    assert headers[b"x-should-retry"] == b"false"
    assert [name for name, _ in table.told].count("abandon") == 2


def test_a_prefiller_counts_as_any_other_engine() -> None:
    table, engines = Table(prefillers=1), Engines(die={"p1", "d1"})
    status, _, body = ask(table, engines)
    assert engines.served == ["p1", "d1"]
    assert (status, body["error"]["code"]) == (500, "engines_lost")

    table, engines = Table(prefillers=2), Engines(die={"d1", "p2"})
    status, _, body = ask(table, engines)
    assert engines.served == ["p1", "d1", "p2"]
    assert (status, body["error"]["code"]) == (500, "engines_lost")
    # The turn that was placed is given back.
    assert [name for name, _ in table.told].count("abandon") == 2


def test_an_engine_that_lives_and_cannot_be_reached_is_tried_as_often_as_ever() -> None:
    class Unreachable(Engines):
        async def healthy(self, url: str) -> bool:
            return True

    table, engines = Table(), Unreachable(die={"d1", "d2"})
    status, _, _ = ask(table, engines)
    assert status == 200
    assert engines.served == ["d1", "d2", "d3"]
    assert table.lost == []


def test_engines_that_were_gone_before_are_not_held_against_the_prompt() -> None:
    """A whole node is lost; that its engines are, routers find out one by one."""
    table, engines = Table(prefillers=3), Engines(die=set(), gone={"p1", "d1", "p2", "d2"})
    status, headers, _ = ask(table, engines)
    assert status == 200
    assert headers[b"x-conserve-decoder"] == b"d3"
    assert table.lost == ["p1", "d1", "p2", "d2"]

    table, engines = Table(), Engines(die=set(), gone={f"d{n}" for n in range(1, 9)})
    status, headers, body = ask(table, engines)
    assert (status, body["error"]["code"]) == (503, "engine_lost")
    assert b"x-should-retry" not in headers
