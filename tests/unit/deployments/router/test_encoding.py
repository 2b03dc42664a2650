"""A turn's new images go by an encoder, and no encoder's failure is the turn's."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from conserve import wire
from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.encoders import Encoder, Encoders, node_of
from conserve.errors import ApiError
from conserve.media import Lifted, name_of, places
from conserve.settings import Settings
from conserve.turn import TurnStats
from deployments.messages import Checked
from deployments.router import prompt
from deployments.router.prompt import Encoding
from deployments.router.turn import TurnEndpoint
from deployments.router.upstream import EngineUnreachable
from tests.unit.deployments.asgi import a_reader
from tests.unit.deployments.router.fakes import (
    FakeEngines,
    FakeTable,
    endpoint_of,
    exchange,
    told_by,
)
from tests.unit.deployments.router.images import data_url, png


def encoded(told: wire.DecoderTurn) -> tuple[int, int]:
    """Return how many images, and embeddings of them, a decoder is told that engines encoded."""
    assert told.stats is not None
    return told.stats.encoded_images, told.stats.encoded_tokens


@dataclass
class Vision(FakeEngines):
    """Engines and an encoder on each node, all of which know images.

    Attributes:
        checked: what a check answers: that the prompt is multimodal.
        encoder_fails: what becomes of what encoders are sent.
        log: what was done, in its order.
    """

    checked: Checked | ApiError = field(default_factory=lambda: Checked([[1, 2, 3]], True, 0))
    encoder_fails: Exception | None = None
    encoder_hangs: bool = False
    log: list[str] = field(default_factory=list)
    encoded: list[tuple[str, Any]] = field(default_factory=list)

    async def prefill(self, url: str, path: str, raw: bytes) -> TurnStats:
        if ":9" not in url:
            self.log.append(f"prefill {node_of(url)}")
            return await super().prefill(url, path, raw)
        self.log.append(f"encode {node_of(url)}")
        self.encoded.append((path, json.loads(raw)))
        if self.encoder_hangs:
            await asyncio.Event().wait()
        if self.encoder_fails is not None:
            raise self.encoder_fails
        return TurnStats(prefilled_tokens=9, encoded_images=1, encoded_tokens=64)

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> Any:
        self.log.append(f"decode {node_of(url)}")
        async with super().post(url, raw, headers) as answer:
            yield answer

    async def healthy(self, url: str) -> bool:
        if ":9" in url:
            return not isinstance(self.encoder_fails, EngineUnreachable)
        return await super().healthy(url)


def body(path: str, *colours: int) -> dict[str, Any]:
    """A turn with an image of each colour."""
    urls = [data_url(png(one)) for one in colours]
    if path == MESSAGES:
        sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
                   for url in urls]  # fmt: skip
        content = [{"type": "image", "source": source} for source in sources]
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    if path == RESPONSES:
        content = [{"type": "input_image", "detail": "auto", "image_url": url} for url in urls]
        return {"input": [{"role": "user", "content": content}]}
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    more = {"mm_processor_kwargs": {"size": 9}, "tools": [], "max_tokens": 700}
    return {"messages": [{"role": "user", "content": content}]} | more


def vision(
    engines: Vision, *nodes: str, table: FakeTable | None = None, **more: Any
) -> TurnEndpoint:
    """Return an endpoint that knows an encoder on each of the nodes."""
    settings = {"encoders.replicas": 1, **more}
    endpoint = endpoint_of(table or FakeTable(), engines, **settings)
    endpoint.media.encoders.update(Encoder(f"e-{node}", f"http://{node}:9") for node in nodes)
    return endpoint


def ask(endpoint: TurnEndpoint, given: dict[str, Any], path: str = CHAT) -> int:
    """The status of the answer to one turn."""
    return int(exchange(endpoint, given, path)[0]["status"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_each_new_image_is_encoded_alone_before_the_prompt_is_computed(path: str) -> None:
    engines = Vision()
    endpoint = vision(engines, "p1", table=FakeTable(prefillers=1))
    assert ask(endpoint, body(path, 1, 2, 1), path) == 200
    assert engines.log == ["encode p1", "encode p1", "prefill p1", "decode d1"]
    _, whole = engines.got[0]
    names = [name_of(place.url) for place in places(whole, path)]
    found = []
    for sent_path, sent in engines.encoded:
        assert sent_path == path
        (place,) = places(sent, path)
        found.append(name_of(place.url))
        # The same part, with the same data, and what changes what is made of it.
        assert place.part in [one.part for one in places(whole, path)]
        assert sent.get("mm_processor_kwargs") == whole.get("mm_processor_kwargs")
        assert sent["model"] == whole["model"]
        assert not {"tools", "stream"} & sent.keys()
    assert sorted(map(str, found)) == sorted(set(map(str, names)))
    # The decoder's report has what encoders did.
    assert encoded(told_by(engines.got[-1][0])) == (2, 128)


@pytest.mark.parametrize(("nodes", "priced"), [(["d1"], 0), ([], 640)])
def test_what_encoders_do_is_not_priced_as_an_engines_work(nodes: list[str], priced: int) -> None:
    table, engines = FakeTable(), Vision(checked=Checked([[1, 2, 3]], True, 640))
    assert ask(vision(engines, *nodes, table=table), body(CHAT, 1)) == 200
    assert table.placed[-1].encode_tokens == priced


def test_an_image_is_sent_once_and_text_never() -> None:
    engines = Vision()
    endpoint = vision(engines, "d1", "d2", "d3")
    assert ask(endpoint, {"messages": [{"role": "user", "content": "hello"}]}) == 200
    assert engines.log == ["decode d1"]
    # The second turn is on another node, and the third on the first one's.
    assert ask(endpoint, body(CHAT, 1)) == 200
    assert ask(endpoint, body(CHAT, 1, 2)) == 200
    assert engines.log[1:] == ["encode d2", "decode d2", "encode d3", "encode d3", "decode d3"]
    for _ in range(2):
        endpoint.table.placed.clear()  # type: ignore[attr-defined]
        assert ask(endpoint, body(CHAT, 1, 2)) == 200
    assert engines.log[6:] == ["encode d1", "encode d1", "decode d1", "decode d1"]


def test_a_later_turn_goes_straight_and_by_an_encoder_if_it_brings_an_image() -> None:
    table, engines = FakeTable(plan={"direct": True}), Vision()
    # Where appends are never moved, such a turn does not ask the table.
    endpoint = vision(engines, "d1", table=table, placement="conversation")
    said = body(CHAT, 1)["messages"]
    said += [{"role": "assistant", "content": "a"}, *body(CHAT, 2)["messages"]]
    said += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "and?"}]
    for turns in (1, 3, 5):
        assert ask(endpoint, {"messages": said[:turns]}) == 200
    assert table.asked == ["begin"]
    assert engines.log == ["encode d1", "decode d1", "encode d1", "decode d1", "decode d1"]
    assert [encoded(told) for told in engines.straight] == [(1, 64), (0, 0)]


def test_of_what_a_node_has_no_second_copy_is_made() -> None:
    reader = a_reader(Settings(encoders={"replicas": 1}))  # type: ignore[arg-type]
    lifted = Lifted(json.dumps(body(CHAT, 1, 2)).encode())
    own = reader.named(json.loads(lifted.raw), CHAT, lifted, None)
    assert reader.to_encode(own, CHAT, lifted) == {}
    reader.encoders.update([Encoder("e", "http://d1:9")])
    one, other = reader.to_encode(own, CHAT, lifted)
    encoder = reader.encoders.begin("d1", one, 0.0)
    assert encoder is not None
    reader.encoders.end(encoder, one)
    assert [*reader.to_encode(own, CHAT, lifted)] == [other]


def test_where_no_encoder_is_near_the_engine_encodes_by_itself() -> None:
    engines = Vision()
    table = FakeTable(prefillers=1)
    assert ask(vision(engines, "d1", table=table), body(CHAT, 1)) == 200
    assert engines.log == ["prefill p1", "decode d1"]


def test_without_the_setting_no_image_is_kept_for_encoders() -> None:
    engines = Vision()
    endpoint = vision(engines, "d1", **{"encoders.replicas": 0})
    assert ask(endpoint, body(CHAT, 1)) == 200
    assert engines.log == ["decode d1"]


@pytest.mark.parametrize(
    ("fails", "lost", "passed_over"),
    [
        (EngineUnreachable("it is gone"), ["e-d1"], True),
        (EngineUnreachable("it cannot be reached", had_request=False), ["e-d1"], True),
        (ApiError(500, "it has failed"), [], True),
        (ApiError(400, "no such image"), [], False),
    ],
)
def test_a_turn_goes_on_without_an_encoder_that_fails(
    fails: Exception, lost: list[str], passed_over: bool
) -> None:
    table, engines = FakeTable(), Vision(encoder_fails=fails)
    endpoint = vision(engines, "d1", table=table)
    assert ask(endpoint, body(CHAT, 1)) == 200
    assert engines.log == ["encode d1", "decode d1"]
    assert table.lost == lost
    table.placed.clear()
    assert ask(endpoint, body(CHAT, 2)) == 200
    assert engines.log[2:] == ([] if passed_over else ["encode d1"]) + ["decode d1"]


def test_a_slow_encoder_is_waited_for_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "LONGEST_ENCODING_S", 0.01)
    engines = Vision(encoder_hangs=True)
    endpoint = vision(engines, "d1")
    assert ask(endpoint, body(CHAT, 1, 2)) == 200
    assert engines.log == ["encode d1", "encode d1", "decode d1"]


def test_an_encoder_that_died_of_a_prompt_counts_as_any_other_engine() -> None:
    table = FakeTable()
    engines = Vision(die={"d1"}, encoder_fails=EngineUnreachable("it is gone"))
    assert ask(vision(engines, "d1", table=table), body(CHAT, 1)) == 500
    assert table.lost == ["e-d1", "d1"]


def test_a_prompt_that_two_encoders_were_lost_with_is_not_computed() -> None:
    table, engines = FakeTable(), Vision(encoder_fails=EngineUnreachable("it is gone"))
    endpoint = vision(engines, table=table)
    endpoint.media.encoders.update(Encoder(f"e{n}", f"http://d1:9/{n}") for n in range(2))
    assert ask(endpoint, body(CHAT, 1, 2)) == 500
    assert table.lost == ["e0", "e1"]
    assert not [done for done in engines.log if done.startswith("decode")]


async def test_what_a_turn_that_has_left_wanted_is_no_longer_an_encoders_work() -> None:
    engines = Vision(encoder_hangs=True)
    encoders = Encoders()
    encoders.update([Encoder("e", "http://d1:9")])
    turn = Turn({"a": b"{}", "b": b"{}"})
    asked = asyncio.create_task(Encoding(engines, encoders).encode(turn, "http://d1", TurnStats()))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert engines.log == ["encode d1"] * 2
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert encoders.lacks("a")
    assert encoders._running == {}


@dataclass
class Turn:
    """The part of a request that encoders are asked by."""

    to_encode: dict[str, bytes]
    path: str = CHAT
