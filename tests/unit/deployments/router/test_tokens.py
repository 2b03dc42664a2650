"""`/tokenize` and `/detokenize`: who is asked, for what, and how many at a time."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from conserve import budget
from conserve.apis import COUNT_TOKENS
from conserve.errors import ApiError
from conserve.media import name_of
from deployments.answers import Engine
from deployments.router import tokens
from deployments.router.frontdoor import FrontDoor
from deployments.router.tokens import by_leisure
from deployments.router.upstream import EngineUnreachable, Upstream
from tests.unit.deployments.asgi import exchanged, told
from tests.unit.deployments.router.fakes import Keys, a_door
from tests.unit.deployments.stub_table import StubTable, listed_engine

STRS_BYTES = budget.MOST_TOKEN_STRS_BYTES
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def a_table(*engines: Engine) -> StubTable:
    """Knows engines, and is told nothing: this is no turn."""
    return StubTable(engines=[*(engines or (listed_engine("d"),))])


class Engines:
    """Answer everything alike, unless they are gone."""

    def __init__(self, *gone: str, error: ApiError | None = None) -> None:
        self.gone = gone
        self.error = error
        self.asked: list[tuple[str, bytes]] = []
        self.at_a_time = self.most_at_a_time = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.full = asyncio.Event()

    async def answered(self, url: str, raw: bytes) -> bytes:
        self.asked.append((url, raw))
        self.at_a_time += 1
        self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        if self.at_a_time == 2:
            self.full.set()
        await self.answers.wait()
        self.at_a_time -= 1
        if url.split("/")[2] in self.gone:
            raise EngineUnreachable("no connection", had_request=False)
        if self.error is not None:
            raise self.error
        return b'{"count": 1}'


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    return use(monkeypatch, Engines())


def use(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> Engines:
    monkeypatch.setattr(Upstream, "answered", lambda self, url, raw: engines.answered(url, raw))
    return engines


async def post(
    door: FrontDoor, path: str, body: Any, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    given = [(b"content-type", b"application/json"), *headers]
    status, _, answer = told(await exchanged(door, body, method="POST", path=path, headers=given))
    return status, json.loads(answer)


def asked(path: str, body: Any, *table: Engine) -> tuple[int, Any]:
    return asyncio.run(post(a_door(a_table(*table)), path, body))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def sized(length: int, token_strs: Any) -> dict[str, Any]:
    """Return a body of this length in JSON."""
    body = {"prompt": "", "return_token_strs": token_strs}
    return {**body, "prompt": "a" * (length - len(json.dumps(body)))}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello", "model": "conserve-embedded"}),
        ("/tokenize", HELLO),
        ("/tokenize", {**HELLO, "tools": [], "return_token_strs": True}),
        ("/tokenize", sized(STRS_BYTES, True)),
        *(("/tokenize", sized(STRS_BYTES + 1, no)) for no in (False, None, 0)),
        ("/detokenize", {"tokens": [5, 6]}),
        (COUNT_TOKENS, {**HELLO, "model": "conserve-embedded"}),
    ],
)
def test_an_engine_answers_what_it_is_sent(engines: Engines, path: str, body: Any) -> None:
    assert asked(path, body) == (200, {"count": 1})
    assert engines.asked == [("http://d" + path, json.dumps(body).encode())]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "x": 2**70}, 400, "x"),
        ("/tokenize", {"prompt": "a", "x": nested(64)}, 400, "x"),
        ("/tokenize", {**HELLO, "tools": [{}] * 513}, 400, "tools"),
        ("/tokenize", {"messages": HELLO["messages"] * 6145}, 400, "messages"),
        ("/tokenize", sized(STRS_BYTES + 1, True), 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a" * budget.MOST_TOKENIZE_BYTES}, 413, None),
        ("/tokenize", '{"prompt": "a"}'.encode("utf-16"), 400, None),
        *(("/detokenize", {"tokens": [odd]}, 400, "tokens") for odd in (-1, 5.0, None, [5])),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 131_073}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "x": [[]] * 20_000}, 400, None),
    ],
)
def test_what_costs_too_much_or_is_no_request_gets_to_no_engine(
    engines: Engines, path: str, body: Any, status: int, param: str | None
) -> None:
    found, answer = asked(path, body)
    assert found == status
    assert answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert engines.asked == []


def test_what_no_turn_may_be_is_not_counted_either(engines: Engines) -> None:
    many = [{"role": "user", "content": "a"}] * 7000
    for body, status in (({"messages": many}, 400), ({**HELLO, "model": "other"}, 404)):
        found, answer = asked(COUNT_TOKENS, body)
        assert found == status
        # In the shape of its API.
        assert answer["type"] == "error"
    assert engines.asked == []


def test_another_engine_is_asked_where_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = use(monkeypatch, Engines("gone"))
    assert (
        asked("/tokenize", HELLO, listed_engine("gone", "prefiller"), listed_engine("d"))[0] == 200
    )
    assert [url for url, _ in engines.asked] == ["http://gone/tokenize", "http://d/tokenize"]
    status, answer = asked("/tokenize", HELLO, listed_engine("gone"))
    assert status == 503
    assert "try again" in answer["error"]["message"]


def test_those_are_asked_first_that_it_disturbs_least() -> None:
    listed = [
        listed_engine("leaving", "prefiller", leaving=True, queued_tokens=0),
        listed_engine("crowded", conversations=9),
        listed_engine("decoder", conversations=2),
        listed_engine("busy", "prefiller", queued_tokens=500),
        listed_engine("idle", "prefiller", queued_tokens=0),
        # It may take shorter prompts than the others.
        listed_engine("encoder", "encoder"),
    ]
    order = [one.id for one in by_leisure(listed)]
    assert order == ["idle", "busy", "decoder", "crowded", "leaving"]


async def test_few_are_asked_for_at_a_time_and_few_wait(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines make tokens of turns' prompts in the same thread."""
    monkeypatch.setattr(tokens, "_MOST_WAITING", 3)
    door = a_door(a_table())
    engines.answers.clear()
    under_way = [asyncio.ensure_future(post(door, "/tokenize", HELLO)) for _ in range(5)]
    await asyncio.wait_for(engines.full.wait(), 10)
    status, answer = await post(door, "/tokenize", HELLO)
    assert status == 429
    assert "try again shortly" in answer["error"]["message"]
    engines.answers.set()
    assert [status for status, _ in await asyncio.gather(*under_way)] == [200] * 5
    # Whoever was refused has taken no place.
    assert (await post(door, "/tokenize", HELLO))[0] == 200
    assert engines.most_at_a_time == 2


async def test_a_key_is_needed_and_its_tenants_media_are_its_own(
    engines: Engines, tmp_path: Path
) -> None:
    keys = Keys(tmp_path)
    pixel = "R0lGODlhAQABAIAAAAAAAAAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
    image = {"url": f"data:image/gif;base64,{pixel}"}
    part = {"type": "image_url", "image_url": image, "uuid": "mine"}
    body = {"messages": [{"role": "user", "content": [part]}]}
    door = a_door(a_table(), keys.settings)
    assert (await post(door, "/tokenize", body))[0] == 401
    bearer = (b"authorization", f"Bearer {keys.acme}".encode())
    assert (await post(door, "/tokenize", body, (bearer,)))[0] == 200
    ((_, raw),) = engines.asked
    sent = json.loads(raw)["messages"][0]["content"][0]
    assert sent["image_url"]["url"].endswith(pixel)
    assert name_of(sent["image_url"]["url"]) is not None
    assert "uuid" not in sent
