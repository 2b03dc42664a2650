"""A later turn goes straight to the decoder that its router remembers, and how that may end."""

import asyncio
import base64
import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conserve import wire
from conserve.direct import Homes
from conserve.history import TurnKey
from conserve.settings import Settings
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from deployments.messages import TurnPlan
from deployments.router.access import Access
from deployments.router.turn import TurnEndpoint
from deployments.router.upstream import EngineUnreachable
from tests.unit.deployments.asgi import exchanged
from tests.unit.deployments.router.test_turn import Engines, Table, Whole, told_by

FIRST = [{"role": "user", "content": "hello"}]
LATER = [*FIRST, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "on"}]


@dataclass
class Placing(Table):
    """Lets later turns go straight."""

    direct: bool = True
    refused_by: list[str | None] = field(default_factory=list)
    # Of each turn that is asked for, its prompt's length, where that is told; and what is said to
    # such a one.
    appended: list[int | None] = field(default_factory=list)
    later: TurnPlan | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "begin":
            (asked,) = arguments
            self.refused_by.append(asked.refused_by)
            self.appended.append(asked.prompt_tokens)
            if self.later is not None and asked.prompt_tokens is not None:
                self.asked.append(method)
                return self.later
        answer = await super().call(method, *arguments)
        return replace(answer, direct=self.direct) if isinstance(answer, TurnPlan) else answer


class Answer(Whole):
    """Of a decoder that was sent a turn straight."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers


@dataclass
class Decoders(Engines):
    """What they do with a turn that comes straight: serve it, refuse it, or die."""

    will: str = "serve"
    straight: list[wire.DecoderTurn] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        told = told_by(headers)
        if told.straight is None:
            async with super().post(url, raw, headers) as response:
                yield response
            return
        self.straight.append(told)
        if self.will == "die":
            self.dead.add(url.removeprefix("http://").partition("/")[0])
            raise EngineUnreachable("gone")
        if self.will == "refuse":
            yield Answer(wire.REFUSED_STATUS, {wire.REFUSED_HEADER: "1"})
            return
        yield Answer(200, {wire.TURN_HEADER: wire.header_value(TurnKey("c", 1, 257))})


def play(
    table: Table,
    decoders: Decoders,
    *chats: list[Any] | dict[str, Any],
    access: Access | None = None,
    key: str = "",
    homes: Homes | None = None,
    **settings: Any,
) -> list[dict[bytes, bytes]]:
    """Chats, and completions, through one router, one after the other; their answers' headers."""
    homes = Homes() if homes is None else homes
    endpoint = TurnEndpoint(Settings(**settings), table, decoders, "router", homes)  # type: ignore[arg-type]
    answers = []

    async def chat(asked: list[Any] | dict[str, Any]) -> None:
        body = {"messages": asked} if isinstance(asked, list) else asked
        headers = {"authorization": f"Bearer {key}"} if key else {}
        path = "/v1/chat/completions" if isinstance(asked, list) else "/v1/completions"

        async def admitted(scope: Any, receive: Any, send: Any) -> None:
            if access is not None:
                access.admit(scope)
            await endpoint(scope, receive, send)

        sent = await exchanged(admitted, body, path=path, headers=headers)
        assert sent[0]["status"] == 200, sent
        answers.append(dict(sent[0]["headers"]))

    for messages in chats:
        asyncio.run(chat(messages))
    return answers


def test_it_goes_straight() -> None:
    table, decoders = Placing(), Decoders(die=set())
    first, later = play(table, decoders, FIRST, LATER)
    assert table.asked == ["begin", "place"]
    assert first[b"x-conserve-decoder"] == later[b"x-conserve-decoder"] == b"d1"
    assert later[b"x-conversation-id"] == b"c"
    (told,) = decoders.straight
    assert told.straight is not None
    assert (told.straight.router_id, told.straight.stated_id) == ("router", None)
    assert len(told.root) == len(told.straight.end) == 16


def test_a_completion_goes_straight_by_its_conversations_id() -> None:
    table, decoders = Placing(), Decoders(die=set())
    named = {"prompt": [1, 2, 3], "conversation_id": "mine"}
    play(table, decoders, named, named, named)
    assert table.asked == ["begin", "place"]
    for told in decoders.straight:
        assert told.straight == wire.Straight("router", stated_id="mine")
        assert told.root == b""
    assert len(decoders.straight) == 2


def test_a_completion_without_an_id_asks_and_is_not_remembered() -> None:
    table, decoders, homes = Placing(), Decoders(die=set()), Homes()
    play(table, decoders, {"prompt": "on"}, {"prompt": "on"}, homes=homes)
    assert table.asked == ["begin", "place"] * 2
    assert decoders.straight == []
    # Its conversation ends with it.
    assert len(homes) == 0
    play(table, decoders, {"prompt": "on", "conversation_id": "mine"}, homes=homes)
    assert len(homes) == 1


def test_what_is_refused_is_asked_for() -> None:
    table, decoders = Placing(), Decoders(die=set(), will="refuse")
    play(table, decoders, FIRST, LATER)
    assert table.asked == ["begin", "place"] * 2
    # What that decoder has done by then is to be known first.
    assert table.refused_by == [None, "d1"]
    assert decoders.served == ["d1", "d2"]


def test_a_decoder_that_is_lost_with_it_is_reported() -> None:
    table, decoders = Placing(), Decoders(die=set(), will="die")
    _, later = play(table, decoders, FIRST, LATER)
    assert table.lost == ["d1"]
    assert later[b"x-conserve-decoder"] == b"d2"


def test_another_first_prompt_and_a_policy_that_wants_to_be_asked_are_asked_for() -> None:
    other = [{"role": "user", "content": "other"}, *LATER[1:]]
    for table, chats in ((Placing(), (FIRST, other)), (Placing(direct=False), (FIRST, LATER))):
        decoders = Decoders(die=set())
        play(table, decoders, *chats)
        assert decoders.straight == []
        assert table.asked.count("begin") == 2


@pytest.mark.parametrize(
    ("limits", "straight"),
    [(Limits(), 1), (Limits(conversations=5), 1), (Limits(turns=2), 0), (Limits(held_tokens=9), 0)],
)
def test_whoever_has_a_limit_of_what_turns_take_is_asked_for(
    limits: Limits, straight: int, tmp_path: Path
) -> None:
    content, key = KeyFile.new().with_key("acme", "2026-01-31")
    content = content.with_tenant("acme", Tenant(limits))
    path = tmp_path / "keys.json"
    keyfile.write(path, content)
    access = Access(Settings(keys_file=str(path)))
    decoders = Decoders(die=set())
    play(Placing(), decoders, FIRST, LATER, access=access, key=key)
    assert [one.tenant for one in decoders.straight] == ["acme"] * straight


FAR = [*LATER[:-1], {"role": "user", "content": "on " * 2000}]
FURTHER = [*FAR, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and on"}]


def test_the_table_says_where_a_turn_that_appends_much_is_prefilled() -> None:
    at_p1 = TurnPlan(
        TurnKey("c", 1, 256), "d1", "http://d1", "p1", "http://p1", later=True, looks_up=True,
        direct=True,
    )  # fmt: skip
    table, decoders = Placing(later=at_p1), Decoders(die=set())
    play(table, decoders, FIRST, LATER, FAR, FURTHER, placement="elastic")
    assert table.asked == ["begin", "place", "begin"]
    # It was counted, once, by the decoder that has its history.
    assert table.appended == [None, 3]
    assert decoders.counted == ["http://tokenizer", "http://d1"]
    assert decoders.served == ["d1", "p1", "d1"]
    assert len(decoders.straight) == 2
    # What it finds there is looked up.
    assert told_by(decoders.got[-1][0]).looks_up


def seen(text: str) -> dict[str, Any]:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [{"type": "text", "text": text}, image]}


def test_a_turn_that_appends_an_image_appends_much() -> None:
    first = [seen("look")]
    later = [*first, {"role": "assistant", "content": "so"}, {"role": "user", "content": "on"}]
    again = [*later, {"role": "assistant", "content": "so"}, seen("and now?")]
    last = [*again, {"role": "assistant", "content": "so"}, {"role": "user", "content": "on"}]
    table, decoders = Placing(), Decoders(die=set())
    play(table, decoders, first, later, again, last, placement="elastic")
    assert table.appended == [None, 3]
    assert len(decoders.straight) == 2


@pytest.mark.parametrize("settings", [{"placement": "conversation"}, {"pausing": False}])
def test_a_turn_that_appends_much_asks_nobody_where_it_stays_anyway(settings: Any) -> None:
    table, decoders = Placing(), Decoders(die=set())
    play(table, decoders, FIRST, FAR, **settings)
    assert table.asked == ["begin", "place"]
    assert len(decoders.straight) == 1
