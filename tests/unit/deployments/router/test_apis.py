"""Turns of Messages and Responses on their way through a router, without engines."""

import asyncio
import base64
import io
import json
import math
import random
from typing import Any

import pytest
from PIL import Image

from conserve import identity, wire
from conserve.apis import COUNT_INPUT, COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.errors import ApiError
from conserve.items import item_id
from conserve.media import Lifted, name_of
from conserve.recognition import chain_of
from conserve.recognition.apis import heard
from conserve.settings import MediaSettings, Settings
from conserve.tenants import Caller, Limits
from conserve.turn import TurnKey
from deployments.answers import Engine
from deployments.engine import turns as engine
from deployments.engine.response_store import ResponseStore
from deployments.messages import Checked
from deployments.router import answer
from deployments.router.request import ClientRequest
from deployments.router.stored import StoredResponses
from deployments.router.upstream import EngineUnreachable, StreamRecord
from deployments.table_client import TableUnavailable
from tests.unit.conserve.recognition.apis.told import event
from tests.unit.deployments import asgi
from tests.unit.deployments.engine.following import engine_turns
from tests.unit.deployments.router import described
from tests.unit.deployments.router.fakes import a_door
from tests.unit.deployments.stub_table import StubTable, listed_engine

Json = dict[str, Any]

MODEL = Settings().model_id
HELLO = [{"role": "user", "content": "hello"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0;"


def a_table(*decoders: str) -> StubTable:
    """Knows these decoders, and a prefiller, by their URLs."""
    prefiller = listed_engine("p", "prefiller", url="p", max_model_len=2048, queued_tokens=0)
    listed = [*map(decoder, decoders)]
    listed.insert(1, prefiller)
    return StubTable(engines=listed, observe=None)


def decoder(url: str) -> Engine:
    return listed_engine(url, url=url, max_model_len=4096, queued_tokens=0)


class Upstream:
    """Decoders that keep responses by their URLs; one that is called `gone` is."""

    def __init__(self, **kept: ResponseStore) -> None:
        self.kept = kept
        self.asked: list[str] = []
        self.looked_up: list[str] = []

    async def stored(
        self, method: str, url: str, response_id: str, tenant: str | None
    ) -> bytes | None:
        self.looked_up.append(response_id)
        if url == "gone":
            raise EngineUnreachable("no connection")
        store = self.kept[url]
        if method == "DELETE":
            return b"" if store.discard(tenant, response_id) else None
        return store.get(tenant, response_id)

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        """Of a token for each letter of the input's text."""
        assert path == RESPONSES
        self.asked.append(url)
        if url == "p":
            raise EngineUnreachable("no connection")
        body = json.loads(raw)
        assert body["model"] == MODEL
        given = body["input"]
        texts = [given] if isinstance(given, str) else map(_text_of, given)
        return Checked([[5] * len("".join(texts))], False, 0)


def stored_by(
    upstream: Upstream | None = None, at: tuple[str, ...] = ("d1",), **kept: ResponseStore
) -> StoredResponses:
    """Return responses that are kept by decoders, as a router finds them."""
    found: Any = Upstream(**kept) if upstream is None else upstream
    return StoredResponses(Settings(), a_table(*at), found)


def _text_of(item: Json) -> str:
    content = item["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def read(
    path: str,
    body: Json,
    stored: StoredResponses | None = None,
    headers: Json | None = None,
    whole: bool = True,
    **settings: Any,
) -> ClientRequest:
    chosen = Settings(**settings)
    request = asgi.read_turn(path, body, settings=chosen, stored=stored, headers=headers)
    # Without the data of long media.
    assert not whole or json.loads(request.raw) == request.body
    return request


# --- Requests -------------------------------------------------------------------------------------


def test_a_response_gets_its_name_from_the_router() -> None:
    names = [read(RESPONSES, {"input": "x", "request_id": "mine"}).body["request_id"]
             for _ in range(2)]  # fmt: skip
    assert names[0] != names[1]
    assert all(name.startswith("resp_") for name in names)
    assert "request_id" not in read(MESSAGES, {"messages": HELLO}).body


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (MESSAGES, {"messages": HELLO, "system": BILLING + "\nYou"}, "system"),
        (RESPONSES, {"input": HELLO, "instructions": BILLING + "\nYou"}, "instructions"),
    ],
)
def test_the_billing_header_does_not_come_to_engines(path: str, body: Json, where: str) -> None:
    assert read(path, body).body[where] == "You"
    assert read(path, body, volatile_text=[]).body[where] == BILLING + "\nYou"


def test_a_history_is_recognised_by_another_api() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    asked = [
        read("/v1/chat/completions", {"messages": chat}),
        read(MESSAGES, {"messages": chat}),
        read(RESPONSES, {"input": chat}),
    ]
    assert asked[0].chain is not None
    assert len(asked[0].chain.ends) == 1
    assert all(one.chain == asked[0].chain for one in asked)
    assert all(one.chat and one.explicit_id is None and not one.one_off for one in asked)


# --- Responses that are kept ----------------------------------------------------------------------


def keep(store: ResponseStore, id_: str, given: Any, conversation: str = "conv-1") -> None:
    said = {"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "a"}]}  # fmt: skip
    response = {"id": id_, "object": "response", "status": "completed", "output": [said]}
    request = json.dumps({"input": given}).encode()
    store.add(id_, conversation, request, json.dumps(response).encode())


def test_a_turn_that_names_a_response_has_its_history() -> None:
    store = ResponseStore(10_000)
    keep(store, "resp_1", "hello")
    upstream = Upstream(d1=ResponseStore(10_000), d2=store)
    stored = stored_by(upstream, ("gone", "d1", "d2"))
    asked = read(RESPONSES, {"input": "b", "previous_response_id": "resp_1", "top_p": 1}, stored)
    assert asked.explicit_id == "conv-1"
    assert "previous_response_id" not in asked.body
    assert asked.body["top_p"] == 1
    # It is recognised by the answer that the decoder has told the table of.
    begun = chain_of(*heard(RESPONSES, {"input": "hello"})).beginning
    assert asked.chain is not None
    assert list(asked.chain.ends) == [begun.tails({"role": "assistant", "content": "a"})[0]]
    assert asked.body["input"][-1] == {"role": "user", "content": "b"}
    # Whichever history it is of.
    keep(store, "resp_3", "hello", identity.further("conv-1", 5))
    other = {"input": "b", "previous_response_id": "resp_3"}
    assert read(RESPONSES, other, stored).explicit_id == "conv-1"
    # A name of the client's own goes before.
    named = {"x-conversation-id": "mine"}
    body = {"input": "b", "previous_response_id": "resp_1"}
    assert read(RESPONSES, body, stored, named).explicit_id == "mine"
    for id_ in ("resp_2", "x" * 1000, "", "../health", "..", "resp_1?", "resp_é"):
        with pytest.raises(ApiError) as error:
            read(RESPONSES, {**body, "previous_response_id": id_}, stored)
        assert error.value.status == 404
        assert error.value.code == "previous_response_not_found"
    text = {"input": "previous_response_id"}
    assert read(RESPONSES, text, stored).body["input"] == "previous_response_id"


def test_a_response_that_is_named_in_escapes_is_not_passed_over() -> None:
    """It is looked for as it is written, and an engine would read it all the same."""
    raw = rb'{"input": "b", "previous\u005fresponse_id": "resp_1"}'
    with pytest.raises(ApiError, match="without escapes") as error:
        asgi.read_turn(RESPONSES, raw)
    assert (error.value.status, error.value.param) == (400, "previous_response_id")


def answered(store: ResponseStore, id_: str, given: Any, *output: Json) -> list[Json]:
    """Keep a response with items; the items, with their ids."""
    items = [{**item, "id": item_id(id_, item["type"], place)} for place, item in enumerate(output)]
    response = {"id": id_, "object": "response", "status": "completed", "output": items}
    store.add(id_, "conv-1", json.dumps({"input": given}).encode(), json.dumps(response).encode())
    return items


TEXT = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
SAID = {"type": "message", "role": "assistant", "status": "completed", "content": [TEXT]}
THOUGHT = {"type": "reasoning", "summary": [],
           "content": [{"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
CALL = {"type": "function_call", "call_id": "call_1_1", "name": "f", "arguments": "{}",
        "status": "completed"}  # fmt: skip


def reference(item: Json) -> Json:
    return {"type": "item_reference", "id": item["id"]}


def test_items_that_are_named_are_looked_up() -> None:
    """As the AI SDK has it from the second turn on; one look-up has what came before."""
    store, user = ResponseStore(10_000), {"role": "user", "content": "hello"}
    upstream = Upstream(d1=ResponseStore(10_000), d2=store)
    stored = stored_by(upstream, ("gone", "d1", "d2"))
    thought, call = answered(store, "resp_1", "hello", THOUGHT, CALL)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    named = [user, reference(thought), reference(call), result]
    second = read(RESPONSES, {"input": named}, stored)
    assert second.explicit_id == "conv-1"
    assert second.body["input"] == [user, thought, call, result]
    (said,) = answered(store, "resp_2", second.body["input"], SAID)
    upstream.looked_up.clear()
    again = {"role": "user", "content": "b"}
    third = read(RESPONSES, {"input": [*named, reference(said), again]}, stored)
    assert third.body["input"] == [user, thought, call, result, said, again]
    assert set(upstream.looked_up) == {"resp_2"}
    # It is what it would have been with the items themselves.
    whole = read(RESPONSES, {"input": third.body["input"]})
    assert third.chain == whole.chain
    assert len(whole.chain.ends) == 2  # type: ignore[union-attr]
    # Behind a response that is named, too.
    both = {"previous_response_id": "resp_1", "input": [result, reference(said)]}
    assert read(RESPONSES, both, stored).body["input"] == [user, thought, call, result, said]


@pytest.mark.parametrize(
    ("id_", "status", "code"),
    [
        ("msg_1_1", 404, "item_not_found"),
        ("msg_../health_0", 404, "item_not_found"),
        (None, 400, None),
    ],
)
def test_an_item_that_nobody_keeps_is_none(id_: Any, status: int, code: str | None) -> None:
    store = ResponseStore(10_000)
    answered(store, "resp_1", "hello", SAID)
    stored = stored_by(d1=store)
    body = {"input": [*HELLO, {"type": "item_reference", "id": id_}]}
    with pytest.raises(ApiError) as error:
        read(RESPONSES, body, stored)
    assert (error.value.status, error.value.code) == (status, code)
    assert str(error.value.param).startswith("input[1]")


def test_items_are_their_tenants() -> None:
    store = ResponseStore(10_000)
    (item,) = answered(store, "resp_1", "hello", SAID)
    stored = stored_by(d1=store)
    raw = json.dumps({"input": [*HELLO, reference(item)]}).encode()
    asyncio.run(stored.with_history(Lifted(raw), None))
    with pytest.raises(ApiError) as error:
        asyncio.run(stored.with_history(Lifted(raw), "acme"))
    assert error.value.status == 404


def test_names_cannot_make_a_body_without_bounds() -> None:
    store = ResponseStore(10**6)
    items = [answered(store, f"resp_{number}", "x" * 100, SAID)[0] for number in range(17)]
    stored = stored_by(d1=store)
    names = [reference(item) for item in items]
    assert len(read(RESPONSES, {"input": names[:16]}, stored).body["input"]) == 16
    with pytest.raises(ApiError, match="too many responses") as error:
        read(RESPONSES, {"input": names}, stored)
    assert (error.value.status, error.value.param) == (400, "input[0]")
    with pytest.raises(ApiError, match="second time"):
        read(RESPONSES, {"input": [names[0], names[0]]}, stored)
    stored.settings = Settings(max_body_bytes=1024, media=MediaSettings(bytes=0))
    with pytest.raises(ApiError, match="too long"):
        read(RESPONSES, {"input": names[:8]}, stored)


def test_a_tenants_media_have_the_same_names_in_the_turns_that_go_on() -> None:
    pixel = "R0lGODlhAQABAIAAAAAAAAAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
    image = {"type": "input_image", "image_url": f"data:image/gif;base64,{pixel}", "uuid": "cat"}
    store = ResponseStore(10_000)
    stored = stored_by(d1=store)
    caller = Caller("acme", admin=False, limits=Limits(), cache_salt="salt")

    def asked(**body: Any) -> Json:
        request = asgi.read_turn(RESPONSES, body, stored=stored, **{"conserve.caller": caller})
        assert request.body["cache_salt"] == "salt"
        return request.body

    first = asked(input=[{"role": "user", "content": [image]}])
    part = first["input"][0]["content"][0]
    assert "uuid" not in part
    assert name_of(part["image_url"]) is not None
    said = {"type": "message", "role": "assistant", "content": "a"}
    response = json.dumps({"id": "resp_1", "status": "completed", "output": [said]}).encode()
    store.add("resp_1", identity.scoped("acme", "c"), json.dumps(first).encode(), response)
    result = {"type": "function_call_output", "call_id": "c", "output": [image]}
    items = asked(previous_response_id="resp_1", input=[result])["input"]
    assert items[0]["content"][0]["image_url"] == part["image_url"]
    assert items[-1]["output"][0]["image_url"] == part["image_url"]


def test_a_history_may_not_be_longer_than_a_body() -> None:
    store = ResponseStore(10**9)
    keep(store, "resp_1", "hello" * 1000)
    stored = stored_by(d1=store)
    stored.settings = Settings(max_body_bytes=2000, media=MediaSettings(bytes=0))
    with pytest.raises(ApiError) as error:
        read(RESPONSES, {"input": "b", "previous_response_id": "resp_1"}, stored)
    assert error.value.status == 413


def test_the_newest_are_kept_as_far_as_there_is_room() -> None:
    store = ResponseStore(5000)
    for number in range(10):
        keep(store, f"resp_{number}", "x" * 1000)
    kept = [number for number in range(10) if store.get(None, f"resp_{number}")]
    assert kept == [8, 9]
    keep(store, "resp_big", "x" * 5000)
    assert store.get(None, "resp_big") is None
    assert store.get(None, "resp_9") is not None
    # Again under the same name: no room is lost.
    for _ in range(10):
        keep(store, "resp_9", "x" * 1000)
    assert store.get(None, "resp_8") is not None
    assert store.discard(None, "resp_9")
    assert not store.discard(None, "resp_9")


def image_of(number: int, length: int = 90_000) -> str:
    """Return the URL of a new image, about this large in bytes."""
    file = io.BytesIO()
    side = math.isqrt(length // 3)
    noise = random.Random(number).randbytes(3 * side * side)
    Image.frombytes("RGB", (side, side), noise).save(file, "PNG", compress_level=0)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_an_image_is_kept_once_for_all_turns_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of several turns, each of which adds an image, go on by responses' ids."""
    monkeypatch.setattr(engine, "_LONG_BYTES", 0)
    media_bytes, turns = 400_000, 4

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        body = {"id": asked["request_id"], "status": "completed", "output": []}
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    keeper = engine_turns(app, responses=ResponseStore(10**6, media_bytes))

    class Decoder(Upstream):
        async def stored(self, method: str, url: str, id_: str, tenant: Any) -> bytes | None:
            scope = {"path": wire.STORED_PREFIX + id_, "method": "GET"}
            status, _, body = asgi.told(await asgi.exchanged(keeper, b"", **scope))
            return body if status == 200 else None

    stored = stored_by(Decoder())
    given = {"media": MediaSettings(bytes=media_bytes), "max_body_bytes": 100_000}
    stored.settings = Settings(**given)
    images = iter(range(1000))

    def turn(conversation: str, before: str | None) -> tuple[str, list[str]]:
        """Serve one turn; its response's id, and the images that its engine is shown."""
        part = {"type": "input_image", "image_url": image_of(next(images))}
        body = {"input": [{"role": "user", "content": [part]}], "previous_response_id": before}
        request = read(RESPONSES, body, stored, whole=False, **given)
        told = wire.DecoderTurn(TurnKey(conversation, 1, 256)).header()
        headers = {wire.TURN_HEADER: told, "content-length": str(len(request.raw))}
        scope = {"path": RESPONSES, "method": "POST", "headers": headers}
        status, _, _ = exchange(keeper, scope, request.raw)
        assert status == 200
        shown = [part["image_url"] for item in json.loads(request.raw)["input"]
                 for part in item["content"]]  # fmt: skip
        return request.body["request_id"], shown

    newest: dict[str, str | None] = dict.fromkeys(("a", "b", "c"))
    seen: dict[str, list[str]] = {name: [] for name in newest}
    for _ in range(turns):
        for name in newest:
            newest[name], shown = turn(name, newest[name])
            assert shown[:-1] == seen[name]
            seen[name] = shown
    # What is kept is bounded all the same.
    store = keeper.responses
    assert store._images.size <= 4 * media_bytes * 4 / 3
    for number in range(40):
        turn(f"other-{number}", None)
        assert store._images.size <= 4 * media_bytes * 4 / 3
    assert not store.get(None, str(newest["a"]))
    for tenant, id_ in list(store._entries):
        assert store.discard(tenant, id_)
    assert (store._images.size, store._used) == (0, 0)


def exchange(app: Any, scope: Json, body: bytes = b"") -> tuple[int, Json, bytes]:
    """Status, headers and body of an answer."""
    return asgi.told(asgi.exchange(app, body, **scope))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("status", "store", "kept"),
    [
        ("completed", None, True),
        ("incomplete", True, True),
        ("failed", True, False),
        ("completed", False, False),
    ],
)
def test_a_decoder_keeps_what_it_was_to_keep(
    streamed: bool, status: str, store: bool | None, kept: bool
) -> None:
    response = {"id": "resp_1", "object": "response", "status": status, "output": []}
    request = {"request_id": "resp_1", "input": "x", **({} if store is None else {"store": store})}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert json.loads((await receive())["body"]) == request
        kind = b"text/event-stream" if streamed else b"application/json"
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-type", kind)]})
        parts = [json.dumps(response).encode()]
        if streamed:
            parts = [
                event("response.created", response={**response, "status": "in_progress"}),
                event(f"response.{status}", response=response),
            ]
        for part in [*parts, b""]:
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    keeper = engine_turns(app)
    turn = {wire.TURN_HEADER: wire.DecoderTurn(TurnKey("acme\tc", 1, 256)).header()}
    asked = {"path": RESPONSES, "method": "POST", "headers": turn}
    assert exchange(keeper, asked, json.dumps(request).encode())[0] == 200
    mine = [(wire.TENANT_HEADER.encode(), b"acme")]
    told = {"path": wire.STORED_PREFIX + "resp_1", "headers": mine}
    code, _, body = exchange(keeper, {**told, "method": "GET"})
    assert code == (200 if kept else 404)
    if kept:
        found = json.loads(body)
        assert (found["history_id"], found["request"]) == ("acme\tc", request)
        assert {name: found["response"][name] for name in response} == response
    assert exchange(keeper, {**told, "method": "DELETE"})[0] == (204 if kept else 404)
    assert exchange(keeper, {**told, "method": "GET"})[0] == 404


# --- Paths and errors -----------------------------------------------------------------------------


def at_the_door(
    method: str, path: str, body: Any = None, upstream: Any = None, **headers: str
) -> tuple[int, Json]:
    """Status and JSON of a router's answer, which is as it is described."""
    door = a_door(a_table("d1"))
    for route in door._paths.routes:
        owner = getattr(route.endpoint, "__self__", None)  # type: ignore[attr-defined]
        if upstream is not None and hasattr(owner, "upstream"):
            owner.upstream = upstream
    given = {"content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    answer = asgi.ask(door, method, path, content=asgi.encoded(body), headers=given)
    told: Json = answer.json()
    described.check(method, path.partition("?")[0], answer.status_code, told)
    return answer.status_code, told


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
@pytest.mark.parametrize(
    ("method", "body", "headers", "status", "kind"),
    [
        ("POST", b"{", {}, 400, "invalid_request_error"),
        ("POST", {"messages": HELLO, "model": "claude"}, {}, 404, "not_found_error"),
        ("GET", b"", {}, 405, "invalid_request_error"),
        ("POST", b"{}", {"content_type": "text/plain"}, 415, "invalid_request_error"),
        ("POST", b"{}", {"host": "evil.example"}, 421, "invalid_request_error"),
        ("POST", b"{}", {"origin": "https://evil.example"}, 403, "permission_error"),
    ],
)
def test_errors_have_the_shape_of_anthropics(
    path: str, method: str, body: Any, headers: Any, status: int, kind: str
) -> None:
    code, told = at_the_door(method, path, body, **headers)
    assert code == status
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    assert told["error"]["message"]


def test_a_responses_input_is_counted_with_what_it_goes_on_from() -> None:
    """As the turn's prompt, by an engine that is there, which serves nothing."""
    counted = {"object": "response.input_tokens"}
    upstream = Upstream(d1=ResponseStore(10_000))
    status, told = at_the_door("POST", COUNT_INPUT, {"input": "hello"}, upstream)
    assert (status, told) == (200, {**counted, "input_tokens": 5})
    assert upstream.asked == ["p", "d1"]
    keep(upstream.kept["d1"], "resp_1", "x" * 30)
    whole = read(
        RESPONSES,
        {"input": "hello", "previous_response_id": "resp_1"},
        stored_by(upstream),
    ).body["input"]
    length = len("".join(map(_text_of, whole)))
    assert length > 30
    body = {"input": "hello", "previous_response_id": "resp_1"}
    status, told = at_the_door("POST", COUNT_INPUT, body, upstream)
    assert (status, told) == (200, {**counted, "input_tokens": length})
    status, told = at_the_door("POST", COUNT_INPUT, {"input": 5}, upstream)
    assert (status, told["error"]["param"]) == (400, "input")


def test_a_response_is_retrieved_and_forgotten() -> None:
    store = ResponseStore(10_000)
    keep(store, "resp_1", "x")
    upstream = Upstream(d1=store)
    path = f"{RESPONSES}/resp_1"
    assert at_the_door("GET", path, upstream=upstream)[1]["id"] == "resp_1"
    status, told = at_the_door("POST", path + "/cancel", {}, upstream)
    assert (status, told["error"]["param"]) == (400, "id")
    assert at_the_door("DELETE", path, upstream=upstream)[1]["deleted"] is True
    for method, where in (("GET", path), ("DELETE", path), ("POST", path + "/cancel")):
        status, told = at_the_door(method, where, {}, upstream)
        assert (status, told["error"]["code"]) == (404, "response_not_found")


def test_the_input_of_a_response_is_listed() -> None:
    store = ResponseStore(100_000)

    def listed(id_: str, query: str = "") -> Json:
        path = f"{RESPONSES}/{id_}/input_items?{query}"
        return at_the_door("GET", path, upstream=Upstream(d1=store))[1]

    keep(store, "resp_1", "hello")
    text = {"type": "input_text", "text": "hello"}
    message = {"id": "msg_1_in_0", "type": "message", "role": "user", "content": [text]}
    whole = {"object": "list", "data": [message], "has_more": False}
    assert listed("resp_1") == {**whole, "first_id": "msg_1_in_0", "last_id": "msg_1_in_0"}
    call, result = {**CALL, "id": "fc_x"}, {"type": "function_call_output", "output": "x"}
    given = [{"role": "user", "content": "hello"}, call, result, {**SAID, "id": "fc_x"}]
    keep(store, "resp_2", [{"role": "assistant", "content": "a"}, *given, *given[:1] * 20])
    pages, query = [], "order=asc&limit=10"
    while not pages or pages[-1]["has_more"]:
        pages.append(listed("resp_2", query))
        query = f"order=asc&limit=10&after={pages[-1]['last_id']}"
    assert [len(page["data"]) for page in pages] == [10, 10, 5]
    items = [item for page in pages for item in page["data"]]
    assert items[0]["content"] == [{"type": "output_text", "text": "a"}]
    assert items[2:5] == [call, {**result, "id": "item_2_in_3"}, given[3]]
    assert len({item["id"] for item in items}) == 24
    assert listed("resp_2")["data"] == items[:4:-1]
    # Of two items with one id, the last counts: so no client turns in a circle.
    assert listed("resp_2", "order=asc&after=fc_x&limit=1")["data"] == items[5:6]
    assert listed("resp_2", f"after={items[0]['id']}")["data"] == []


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ("resp_2", 404, "id"),
        ("resp_acme", 404, "id"),
        ("resp_1?limit=101", 400, "limit"),
        ("resp_1?order=up", 400, "order"),
        ("resp_1?after=msg_1_0", 400, "after"),
    ],
)
def test_an_input_is_not_listed(asked: str, status: int, param: str) -> None:
    store = ResponseStore(10_000)
    keep(store, "resp_1", "hello")
    keep(store, "resp_acme", "hello", identity.scoped("acme", "c"))
    id_, _, query = asked.partition("?")
    path = f"{RESPONSES}/{id_}/input_items?{query}"
    found, told = at_the_door("GET", path, upstream=Upstream(d1=store))
    assert (found, told["error"]["param"]) == (status, param)


def test_the_model_is_listed_before_any_decoder_can_say_how_much_it_takes() -> None:
    """The table is not there at first, and then knows no decoder, and then one."""
    says: list[Any] = [TableUnavailable(), [], [decoder("d")]]

    def engines(exact: bool) -> list[Engine]:
        answer = says.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [listed_engine("p", "prefiller", max_model_len=2048), *answer]

    door = a_door(StubTable(engines=engines))
    seen = [asgi.ask(door, "GET", "/v1/models").json()["data"][0] for _ in range(4)]
    assert [card["id"] for card in seen] == [MODEL] * 4
    assert [card["max_model_len"] for card in seen] == [None, None, 4096, 4096]
    anthropic = {"anthropic-version": "2023-06-01"}
    card = asgi.ask(door, "GET", f"/v1/models/{MODEL}", headers=anthropic).json()
    assert (card["max_input_tokens"], card["max_tokens"]) == (4096, 4096)
    assert card["display_name"] == MODEL
    assert asgi.ask(door, "GET", "/v1/models", headers=anthropic).json()["has_more"] is False
    assert says == []


# --- What is seen of an answer --------------------------------------------------------------------


class Answer:
    """An engine's stream, whose parts come a second apart.

    Attributes:
        now_s: the time, which begins with the request.
    """

    status = 200
    content_type = "text/event-stream"
    raw_headers = ((b"Content-Type", b"text/event-stream"),)

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts
        self.content = self
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    async def iter_any(self) -> Any:
        for part in self._parts:
            self.now_s += 1
            yield part


CREATED = event("response.created", response={"tools": [{"type": "function"}]})


@pytest.mark.parametrize(
    ("path", "parts", "first", "gaps", "effective"),
    [
        (
            RESPONSES,
            [
                CREATED,
                event("response.in_progress"),
                event("response.output_item.added", item={"type": "message"}),
                event("response.output_text.delta", delta="a"),
                event("response.output_text.delta", delta="b") * 2,
                event("response.completed"),
            ],
            3,
            [1, 0.5, 0.5],
            True,
        ),
        (
            MESSAGES,
            [event("message_start"),
             event("content_block_start", content_block={"type": "tool_use"})],
            1,
            [],
            False,
        ),
    ],
)  # fmt: skip
def test_times_are_those_of_output(
    path: str,
    parts: list[bytes],
    first: int,
    gaps: list[float],
    effective: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    theirs = Answer(parts)
    monkeypatch.setattr(answer, "time", theirs)
    seen = answer.RelayedAnswer(path, 0.0, send, StreamRecord(path))
    asyncio.run(seen.relay(theirs, []))  # type: ignore[arg-type]
    assert b"".join(sent) == b"".join(parts)
    assert seen.ttft_s == first
    assert seen.tbt_s == gaps
    assert seen.effective is effective


def test_a_call_counts_though_another_engine_has_ended_the_stream() -> None:
    async def send(message: Any) -> None: ...

    seen = answer.RelayedAnswer(MESSAGES, 0.0, send, StreamRecord(MESSAGES))
    call = event("content_block_start", content_block={"type": "tool_use"})
    rest = event("message_delta") + event("message_stop")
    for parts in ([event("message_start"), call], [rest]):
        asyncio.run(seen.relay(Answer(parts), []))  # type: ignore[arg-type]
    assert not seen.effective


async def test_a_stream_that_has_begun_ends_with_an_error_of_its_api() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    relayed = answer.RelayedAnswer(RESPONSES, 0.0, send, StreamRecord(RESPONSES))
    with pytest.raises(answer.StreamBroken):
        await relayed.relay(Answer([event("response.created")]), [])  # type: ignore[arg-type]
    lost = ApiError(503, "lost", "engine_lost")
    await relayed.end_with(lost, [])
    # Its event is the second.
    assert lost.event(RESPONSES, 1) in sent
