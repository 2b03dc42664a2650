"""A turn's way past engines and table that fail, without either."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conserve import identity, wire
from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, form_of
from conserve.errors import ApiError
from conserve.history import TurnKey
from conserve.settings import Settings, load
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from conserve.wire import Emitted
from deployments.messages import Checked, Prefilled, Refusal, TurnPlan, TurnTenant, Unplaced
from deployments.router.access import Access
from deployments.router.turn import TurnEndpoint
from deployments.router.upstream import EngineUnreachable
from tests.unit.deployments import asgi
from tests.unit.deployments.stub_table import StubTable
from tests.unit.deployments.table import virtual_time

PROMPT = {"messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Table(StubTable):
    """Binds each turn to the next decoder, with a prefiller of its own if there are any."""

    prefillers: int = 0
    id: str = "c"
    asked: list[str] = field(default_factory=list)
    tenants: list[Any] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    placed_tokens: list[int] = field(default_factory=list)
    openings: list[Any] = field(default_factory=list)

    async def call(self, method: str, *arguments: Any) -> Any:
        self.asked.append(method)
        turn = self.asked.count("place")
        if method in ("begin", "place"):
            self.tenants.append(arguments[0].tenant)
        if method == "begin":
            return Unplaced(self.id, "http://tokenizer", "tokenizer", 1000, claim=turn + 1)
        if method == "place":
            self.placed_tokens.append(arguments[0].prompt_tokens)
            self.openings.append(arguments[0].opening)
            prefiller = f"p{turn}" if turn <= self.prefillers else None
            url = None if prefiller is None else f"http://{prefiller}"
            key = TurnKey(self.id, 1, turn)
            return TurnPlan(key, f"d{turn}", f"http://d{turn}", prefiller, url)
        assert method == "engine_lost"
        self.lost.append(arguments[0])
        return None

    def tell(self, method: str, *arguments: Any) -> None:
        self.told.append((method, arguments[0]))


def told_by(headers: dict[str, str]) -> wire.DecoderTurn:
    """Read what a decoder is told of a turn."""
    return wire.DecoderTurn.read(headers[wire.TURN_HEADER])


@dataclass
class Engines:
    """Engines by their URL's host.

    Attributes:
        die: those that are gone once they have the prompt.
        gone: those that were gone before.
        multimodal: whether prompts have images.
        prefills: the paths of what is prefilled.
        counted: which engines have counted a prompt.
        asked: what they were asked to do, and by which paths.
        summary: what decoders tell of a turn at its end.
    """

    die: set[str]
    gone: set[str] = field(default_factory=set)
    multimodal: bool = False
    prefills: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    prefilled: Prefilled = field(default_factory=lambda: Prefilled(3, 0))
    got: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    summary: wire.TurnSummary | None = None

    def _serve(self, url: str) -> None:
        name = url.removeprefix("http://").partition("/")[0]
        if name in self.gone:
            self.dead.add(name)
            raise EngineUnreachable(f"cannot connect to {name}", had_request=False)
        self.served.append(name)
        if name in self.die:
            self.dead.add(name)
            raise EngineUnreachable(f"{name} is gone")

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        self.counted.append(url)
        self.asked.append(("check", path))
        return Checked([[1, 2, 3]], self.multimodal, 0)

    async def prefill(self, url: str, path: str, raw: bytes) -> Prefilled:
        self._serve(url)
        self.prefills.append(path)
        self.asked.append(("prefill", path))
        self.got.append(({}, json.loads(raw)))
        return self.prefilled

    async def healthy(self, url: str) -> bool:
        return url.removeprefix("http://") not in self.dead

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator["Whole"]:
        self._serve(url)
        self.got.append((headers, json.loads(raw)))
        self.asked.append(("post", "/v1" + url.partition("/v1")[2]))
        yield Whole(self.summary)


class Whole:
    """An engine's answer in one piece."""

    status = 200
    content_type = "application/json"
    raw_headers = ((b"Content-Type", b"application/json"),)

    def __init__(self, summary: wire.TurnSummary | None = None) -> None:
        said = {} if summary is None else {wire.SUMMARY_HEADER: msgspec.json.encode(summary)}
        self.headers = {name: value.decode() for name, value in said.items()}

    async def read(self) -> bytes:
        return b'{"choices": []}'


def ask(
    table: Table, engines: Engines, access: Access | None = None, key: str = ""
) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers and body of the answer to one chat, with this key if there are any."""
    start, body = exchange(table, engines, PROMPT, access, key)
    return start["status"], dict(start["headers"]), json.loads(body["body"])


def exchange(
    table: Table,
    engines: Engines,
    body: dict[str, Any],
    access: Access | None = None,
    key: str = "",
    headers: dict[str, str] | None = None,
    path: str = "/v1/chat/completions",
    run: Callable[[Any], Any] = asyncio.run,
    **settings: Any,
) -> list[dict[str, Any]]:
    """All that is sent in answer to one turn."""
    endpoint = TurnEndpoint(load(settings), table, engines, "router")  # type: ignore[arg-type]
    keys = {"authorization": f"Bearer {key}", "x-api-key": key} if key else {}

    async def admitted(scope: Any, receive: Any, send: Any) -> None:
        if access is not None:
            access.admit(scope)
        await endpoint(scope, receive, send)

    scope = {"path": path, "headers": {**(headers or {}), **keys}}
    sent: list[dict[str, Any]] = []

    async def collect() -> None:
        sent.extend(await asgi.exchanged(admitted, body, **scope))

    run(collect())
    return sent


def test_a_turn_outlives_the_engine_that_it_was_on() -> None:
    table, engines = Table(), Engines(die={"d1"})
    status, headers, _ = ask(table, engines)
    assert status == 200
    assert headers[b"x-conserve-decoder"] == b"d2"
    assert (engines.served, table.lost) == (["d1", "d2"], ["d1"])


def test_a_client_is_told_which_of_its_tools_and_fields_are_left_out() -> None:
    function = {"type": "function", "name": "f"}
    group = {"type": "namespace", "name": "n", "description": "", "tools": [
        function, {"type": "custom", "name": "c"}]}  # fmt: skip
    tools = [function, {"type": "web_search"}, {"type": "web_search"}, group]
    engines = Engines(die=set())
    body = {"input": "x", "tools": tools, "keep_alive": 5, "think": False}
    start, _ = exchange(Table(), engines, body, path="/v1/responses")
    told = dict(start["headers"])[b"x-conserve-unserved-tools"]
    assert told == b"web_search,custom"
    assert dict(start["headers"])[b"x-conserve-ignored-fields"] == b"keep_alive,think"
    assert [tool["type"] for tool in engines.got[-1][1]["tools"]] == ["function", "namespace"]
    start, _ = exchange(Table(), engines, {"input": "x"}, path="/v1/responses")
    assert not {b"x-conserve-unserved-tools", b"x-conserve-ignored-fields"} & {
        *dict(start["headers"])
    }


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


@pytest.mark.parametrize("look_up", [False, True])
@pytest.mark.parametrize("parks", [False, True])
def test_decoders_are_told_what_lmcache_is_to_be_asked_and_given(
    look_up: bool, parks: bool
) -> None:

    class Telling(Table):
        async def call(self, method: str, *arguments: Any) -> Any:
            plan = await super().call(method, *arguments)
            return replace(plan, looks_up=look_up, parks=parks) if method == "place" else plan

    engines = Engines(die=set())
    assert ask(Telling(), engines)[0] == 200
    sent, _ = engines.got[-1]
    told = told_by(sent)
    assert (told.looks_up, told.parks) == (look_up, parks)


@pytest.mark.parametrize(
    ("given", "resume_s", "last"),
    [
        ({}, None, False),
        ({"x-conserve-expected-resume-s": "2.5"}, 2.5, False),
        ({"x-conserve-last-step": "true"}, None, True),
        ({"x-conserve-last-step": "false"}, None, False),
    ],
)
def test_decoders_are_told_when_the_client_expects_the_next_turn(
    given: dict[str, str], resume_s: float | None, last: bool
) -> None:
    """In words of our own: what a client puts into them goes no further than the router."""
    engines = Engines(die=set())
    forged = {wire.TURN_HEADER: wire.DecoderTurn(resume_s=99, last=True).header()}
    exchange(Table(), engines, PROMPT, headers={**forged, **given})
    told = told_by(engines.got[-1][0])
    assert (told.resume_s, told.last) == (resume_s, last)


def test_engines_get_the_tenants_salt_and_nothing_of_its_key(tmp_path: Path) -> None:
    content, key = KeyFile.new().with_key("acme", "2026-01-31")
    content = content.with_tenant("acme", Tenant(Limits(turns=3)))
    path = tmp_path / "keys.json"
    keyfile.write(path, content)
    generated = identity.new_id()
    table = Table(prefillers=1, id=identity.scoped("acme", generated))
    engines = Engines(die=set())
    access = Access(Settings(keys_file=str(path)))
    status, headers, _ = ask(table, engines, access, key)
    assert status == 200
    # The client knows nothing of scopes.
    assert headers[b"x-conversation-id"] == generated.encode()
    (_, prefill), (sent, decode) = engines.got
    assert prefill["cache_salt"] == decode["cache_salt"] == content.cache_salt("acme")
    assert key not in json.dumps([sent, decode, prefill])
    assert not {name.lower() for name in sent} & {"authorization", "x-api-key"}
    key = told_by(sent).key
    assert key is not None
    assert key.history_id == table.id
    assert table.tenants == [TurnTenant("acme", Limits(turns=3))] * 2
    (timing,) = [told for name, told in table.told if name == "observe"]
    assert timing.tenant == "acme"


@pytest.mark.parametrize("multimodal", [True, False])
def test_a_prefiller_gets_images_with_the_turn_that_has_them(multimodal: bool) -> None:
    engines = Engines(set(), multimodal=multimodal)
    assert ask(Table(prefillers=1), engines)[0] == 200
    (_, prefill), (_, decode) = engines.got
    if multimodal:
        assert engines.prefills == ["/v1/chat/completions"]
        assert prefill == decode
    else:
        assert engines.prefills == ["/v1/completions"]
        assert prefill == {"model": decode["model"], "prompt": [1, 2, 3], "max_tokens": 1}


@pytest.mark.parametrize(("agent", "more"), [("claude-cli/2.1", wire.ROOM_LEFT), ("other/1", "")])
def test_every_engine_is_told_that_what_room_there_is_will_do(agent: str, more: str) -> None:
    """Also one that gets images, and judges the turn once more."""
    engines = Engines(set(), multimodal=True)
    asked = {**PROMPT, "max_tokens": 32_000}
    exchange(Table(prefillers=1), engines, asked, headers={"user-agent": agent})
    path = "/v1/chat/completions" + more
    assert engines.asked == [("check", path), ("prefill", path), ("post", path)]


@pytest.mark.parametrize(
    ("prefillers", "found", "told"), [(1, 2, 2), (1, 0, 0), (1, None, None), (0, 2, None)]
)
def test_a_decoder_is_told_what_the_prefiller_had_found(
    prefillers: int, found: int | None, told: int | None
) -> None:
    engines = Engines(set(), prefilled=Prefilled(3, 0, found))
    assert ask(Table(prefillers), engines)[0] == 200
    assert told_by(engines.got[-1][0]).prefill_cached_tokens == told


def test_a_decoder_is_not_told_of_an_earlier_prefill() -> None:
    """It is lost, and the next one gets a plan without a prefiller."""
    engines = Engines({"d1"}, prefilled=Prefilled(3, 0, 1))
    assert ask(Table(1), engines)[0] == 200
    assert told_by(engines.got[-1][0]).prefill_cached_tokens is None


def test_a_turn_that_was_let_in_is_held_to_no_limit_again(tmp_path: Path) -> None:
    """What its tenant has begun since must not cut it off."""
    content, key = KeyFile.new().with_key("acme", "2026-01-31")
    path = tmp_path / "keys.json"
    keyfile.write(path, content)
    access = Access(Settings(keys_file=str(path)))
    table = Table(id=identity.scoped("acme", "task"))
    status, _, _ = ask(table, Engines(die={"d1"}), access, key)
    assert status == 200
    assert [None if one is None else one.name for one in table.tenants] == [
        *("acme", "acme"),
        *(None, None),
    ]


def test_every_chat_is_recognised_by_its_messages() -> None:
    """A conversation that was named too: it may have several histories."""
    for history_id in ("task-42", identity.scoped("acme", identity.new_id())):
        engines = Engines(die=set())
        ask(Table(id=history_id), engines)
        ((sent, _),) = engines.got
        assert told_by(sent).recognises


# --- streams ------------------------------------------------------------------------------------

STREAMED = {**PROMPT, "stream": True}
ANSWER = ["one ", "two ", "three ", "four"]
DEAD = b'data: {"error":{"code":"dead"}}\n\n'


@pytest.mark.parametrize("continue_streams", [True, False])
def test_the_table_is_told_what_a_turn_took_wherever_it_ran(continue_streams: bool) -> None:
    """Its log has a line for each; see `deployments/table/lines.py`."""
    done = wire.TurnSummary(600, 0, 512, 4, queued_s=0.1, prefill_s=0.2, decode_s=0.3)
    for streams, summary in ((False, done), (True, done), (True, None)):
        table = Table(prefillers=1)
        engines = Streams(set(), summary=summary) if streams else Engines(set(), summary=summary)
        body = STREAMED if streams else PROMPT
        exchange(
            table, engines, body, headers={"x-request-id": "mine"},
            continue_streams=continue_streams,
        )  # fmt: skip
        timing = table.told[-1][1]
        assert (timing.outcome, timing.request_id, timing.error) == ("completed", "mine", None)
        assert (timing.decoder_id, timing.prefiller_id) == ("d1", "p1")
        assert timing.placement == "home"
        assert timing.summary == summary
        here = {"recognition", "wait", "count", "prefill", "decode"}
        assert set(timing.phases) == here | ({"handoff"} if summary else set())


def test_a_turn_that_is_refused_names_the_error_and_not_its_text() -> None:
    table = Table()
    exchange(table, Engines(set()), {"messages": "no list"}, headers={"x-request-id": "mine"})
    (timing,) = [given for method, given in table.told if method == "observe"]
    assert (timing.outcome, timing.request_id) == ("refused", "mine")
    table = Table(prefillers=0)
    exchange(table, Engines({"d1", "d2", "d3"}), PROMPT)
    timing = table.told[-1][1]
    assert (timing.outcome, timing.error) == ("failed", "engines_lost")


@dataclass
class Stream:
    """A decoder's answer, that breaks off after so many events; numbers are seconds of silence."""

    events: Sequence[bytes | int]
    breaks: Exception | None = None
    status = 200
    content_type = "text/event-stream"
    raw_headers = ((b"Content-Type", b"text/event-stream"),)

    @property
    def content(self) -> "Stream":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for event in self.events:
            if isinstance(event, int):
                await asyncio.sleep(event)
            else:
                yield event
        if self.breaks is not None:
            raise self.breaks


@dataclass
class Streams(Engines):
    """Decoders that stream the same answer, each in a second of its own.

    Attributes:
        after: how many events a decoder puts out before it dies.
        notes: whether they say what is in an event.
        last_words: what they put out when they die.
    """

    after: dict[str, int] = field(default_factory=dict)
    notes: bool = True
    last_words: bytes = b""
    posted: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        self._serve(url)
        self.posted.append((raw, headers))
        name = self.served[-1]
        answer = [
            _noted(number, text, self.notes and told_by(headers).notes)
            for number, text in enumerate(ANSWER)
        ]
        answer = [event.replace(b"$", str(len(self.posted)).encode()) for event in answer]
        if name not in self.after:
            told = b"" if self.summary is None else wire.note(self.summary)
            yield Stream([*answer, told + b"data: [DONE]\n\n"])
            return
        answer = answer[: self.after[name]]
        self.dead.add(name)
        if self.last_words:
            yield Stream([*answer, self.last_words])
        else:
            yield Stream(answer, EngineUnreachable(f"{name} is gone"))


def _noted(number: int, text: str, noted: bool) -> bytes:
    chunk = {"id": "chatcmpl-x", "created": "$", "choices": [{"delta": {"content": text}}]}
    event = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    event = event.replace(b'"$"', b"$")
    return wire.note([Emitted([number])]) + event if noted else event


def _streamed(table: Table, engines: Engines, **settings: Any) -> tuple[str, list[Any]]:
    """The text of a streamed answer, and the events that hold none."""
    start, *parts = exchange(table, engines, STREAMED, **settings)
    assert start["status"] == 200
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    text, others, created = [], [], set()
    for event in b"".join(part["body"] for part in parts).split(b"\n\n")[:-1]:
        assert event.startswith(b"data: ")
        if event == b"data: [DONE]":
            others.append("done")
            continue
        parsed = json.loads(event[6:])
        if "error" in parsed:
            others.append(parsed["error"]["code"])
        else:
            created.add(parsed["created"])
            text.append(parsed["choices"][0]["delta"]["content"])
    # One answer has one time.
    assert len(created) <= 1
    return "".join(text), others


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("last_words", [b"", DEAD, DEAD + b"data: [DONE]\n\n"])
def test_a_stream_outlives_its_decoder(after: int, last_words: bytes) -> None:
    table, engines = Table(), Streams(die=set(), after={"d1": after}, last_words=last_words)
    assert _streamed(table, engines) == ("".join(ANSWER), ["done"])
    assert (engines.served, table.lost) == (["d1", "d2"], ["d1"])
    # The second one is told what the client has, and under which name it was given.
    body, headers = engines.posted[1]
    size = told_by(headers).sent_bytes
    assert wire.read_notes(body[:size]) == [Emitted([number]) for number in range(after)]
    assert body[size:] == engines.posted[0][0]
    assert headers["x-request-id"] == "x"
    # And room is found for all of it: the prompt's three tokens, and these.
    assert table.placed_tokens == [3, 3 + after]
    # Which are the first prompt, and more than that.
    assert [one.chain.ends_with_root for one in table.openings] == [True, False]
    (timing,) = [argument for name, argument in table.told if name == "observe"]
    assert (timing.outcome, timing.continued) == ("completed", 1)


@pytest.mark.parametrize("continues", [True, False])
def test_a_stream_whose_first_word_is_an_error_begins_at_another_decoder(continues: bool) -> None:
    """The engine died with the prompt: the answer's status had been sent, and nothing of it."""
    last_words = DEAD + b"data: [DONE]\n\n"
    table, engines = Table(), Streams(die=set(), after={"d1": 0}, last_words=last_words)
    answer = _streamed(table, engines, continue_streams=continues)
    assert answer == ("".join(ANSWER), ["done"])
    assert (engines.served, table.lost) == (["d1", "d2"], ["d1"])
    assert told_by(engines.posted[1][1]).sent_bytes == 0


def test_a_stream_that_two_decoders_were_lost_with_ends_in_an_error() -> None:
    table, engines = Table(), Streams(die=set(), after={"d1": 1, "d2": 2})
    assert _streamed(table, engines) == ("one two ", ["engines_lost"])
    assert engines.served == ["d1", "d2"]
    assert [name for name, _ in table.told].count("abandon") == 2


def test_an_error_of_a_decoder_that_lives_is_its_answer() -> None:
    class Living(Streams):
        async def healthy(self, url: str) -> bool:
            return True

    error = b'data: {"error":{"code":"refused"}}\n\ndata: [DONE]\n\n'
    for after, said in ((2, "one two "), (0, "")):
        for continues in (True, False):
            table, engines = Table(), Living(die=set(), after={"d1": after}, last_words=error)
            answer = _streamed(table, engines, continue_streams=continues)
            assert answer == (said, ["refused", "done"])
            assert engines.served == ["d1"]


@pytest.mark.parametrize("continues", [True, False])
def test_a_refusal_in_a_streams_first_event_gets_its_status(continues: bool) -> None:
    class Living(Streams):
        async def healthy(self, url: str) -> bool:
            return True

    error = b'data: {"error":{"message":"no such token","param":"logit_bias","code":400}}\n\n'
    error += b"data: [DONE]\n\n"
    table, engines = Table(), Living(die=set(), after={"d1": 0}, last_words=error)
    start, body = exchange(table, engines, STREAMED, continue_streams=continues)
    assert start["status"] == 400
    told = json.loads(body["body"])["error"]
    assert (told["message"], told["param"]) == ("no such token", "logit_bias")
    assert told["type"] == "invalid_request_error"
    assert [name for name, _ in table.told].count("abandon") == 1
    # Once something has been sent, the status cannot be had back.
    table, engines = Table(), Living(die=set(), after={"d1": 2}, last_words=error)
    assert _streamed(table, engines, continue_streams=continues) == ("one two ", [400, "done"])


@pytest.mark.parametrize(("notes", "continues"), [(False, True), (True, False)])
def test_a_stream_that_cannot_or_is_not_to_go_on_ends_in_an_error(
    notes: bool, continues: bool
) -> None:
    table, engines = Table(), Streams(die=set(), after={"d1": 2}, notes=notes)
    answer = _streamed(table, engines, continue_streams=continues)
    assert answer == ("one two ", ["engine_lost"])
    assert engines.served == ["d1"]
    if not continues:
        assert not told_by(engines.posted[0][1]).notes


@pytest.mark.parametrize(
    ("refused", "refusal"),
    [
        ("begin", Refusal(503, "no engine is ready", "unavailable", 5)),
        ("place", Refusal(429, "64 conversations wait for room already", "queue_full", 5)),
    ],
)
def test_a_stream_waits_for_a_decoder_where_there_is_none_or_none_with_room(
    monkeypatch: pytest.MonkeyPatch, refused: str, refusal: Refusal
) -> None:
    monkeypatch.setattr("deployments.router.turn._REPLACEMENT_POLL_S", 0.0)

    class Alone(Table):
        refusals = 0

        async def call(self, method: str, *arguments: Any) -> Any:
            if method == refused and self.lost and self.refusals < 4:
                self.refusals += 1
                return refusal
            return await super().call(method, *arguments)

    table, engines = Alone(), Streams(die=set(), after={"d1": 2})
    assert _streamed(table, engines) == ("".join(ANSWER), ["done"])
    assert table.refusals == 4


# --- streams that wait ----------------------------------------------------------------------------

# Bodies of streamed turns, and the beginning of an event with output.
ASKED = {
    CHAT: (STREAMED, b""),
    COMPLETIONS: ({"prompt": "hello", "stream": True}, b""),
    MESSAGES: ({**STREAMED, "max_tokens": 9}, b"event: content_block_delta\n"),
    RESPONSES: ({"input": "hello", "stream": True}, b"event: response.x.delta\n"),
}


@dataclass
class Waiting(Table):
    """Takes 40 s or so for a method, and knows no engine for a while once one is lost."""

    slow: str = "place"
    wait_s: int = 40
    refuses: bool = False
    polls: int = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "begin" and self.lost and self.polls < 3:
            self.polls += 1
            return Refusal(503, "no engine is ready", "unavailable", 5)
        if method == self.slow:
            await asyncio.sleep(self.wait_s)
            if self.refuses:
                return Refusal(429, "no room in time", "queue_timeout", 5)
        return await super().call(method, *arguments)


@dataclass
class Scripted(Engines):
    """Decoders that send these parts each; one is lost if its last part is silence."""

    scripts: list[list[bytes | int]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        self._serve(url)
        parts = self.scripts.pop(0)
        if isinstance(parts[-1], int):
            self.dead.add(self.served[-1])
            yield Stream(parts, EngineUnreachable("gone"))
        else:
            yield Stream(parts)
            # It takes a while to give the connection back.
            await asyncio.sleep(40)


# 1 and 2 are events with output, ( and ) the halves of the first, ~ is silence of 7 s, k a comment
# or ping of the router's, c and p are the engine's own, and E ends a stream.
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("slow", "decoders", "got"),
    [
        ("begin", ["12E"], "kk12E"),
        ("place", ["12E"], "kk12E"),
        ("", ["~~1~~2~~E"], "12E"),
        ("", ["~~~~~~1~~~~~~2~~~E"], "kk1kk2kE"),
        ("", ["(~~~~~~)2E"], "kk12E"),
        ("", ["~c~p~~1p2E"], "k12E"),
        ("", ["~~~", "12E"], "k12E"),
        ("", ["~(~~", "12E"], "k12E"),
        ("", ["c", "12E"], "12E"),
    ],
)
def test_a_stream_is_never_silent_for_long(
    path: str, slow: str, decoders: list[str], got: str
) -> None:
    body, begins = ASKED[path]
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    kept_alive = ping if path == MESSAGES else b": keep-alive\n\n"
    one, end = begins + b"data: {1}\n\n", form_of(path).ends[0].strip() + b"\n\n"
    sent = {"1": one, "2": one.replace(b"1", b"2"), "(": one[:8], ")": one[8:], "E": end}
    sent |= {"k": kept_alive, "c": b": processing\n\n", "p": ping}
    scripts = [[sent.get(part, 7) for part in script] for script in decoders]
    table, engines = Waiting(slow=slow), Scripted(set(), scripts=scripts)
    named = {"x-conversation-id": "c"}
    start, *parts = exchange(table, engines, body, headers=named, path=path, run=virtual_time.run)
    assert b"".join(part["body"] for part in parts) == b"".join(sent[part] for part in got)
    headers = dict(start["headers"])
    assert (start["status"], headers[b"x-conversation-id"]) == (200, b"c")
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert (b"x-conserve-decoder" in headers) == (not slow)
    timing = table.told[-1][1]
    assert (timing.outcome, len(timing.tbt_s)) == ("completed", 1)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("stream", "wait_s"), [(True, 14), (True, 40), (False, 40)])
def test_a_refusal_has_its_status_unless_the_stream_has_begun(
    path: str, stream: bool, wait_s: int
) -> None:
    table, body = Waiting(wait_s=wait_s, refuses=True), {**ASKED[path][0], "stream": stream}
    start, *alive, told = exchange(table, Engines(set()), body, path=path, run=virtual_time.run)
    begun = stream and wait_s > 15
    assert (start["status"], len(alive)) == ((200, 2) if begun else (429, 0))
    assert (b"retry-after" in dict(start["headers"])) == (not begun)
    error = json.loads(told["body"].rpartition(b"data: ")[2])
    error = error.get("error", error)
    assert error["message"] == "no room in time"
    assert error.get("code", error["type"]) in ("queue_timeout", "rate_limit_error")
    assert [given.outcome for name, given in table.told if name == "observe"] == ["refused"]


def test_half_a_first_event_is_not_put_before_the_next_decoders() -> None:
    class Half(Streams):
        @contextlib.asynccontextmanager
        async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
            if "d1" in url:
                self._serve(url)
                self.posted.append((raw, headers))
                self.dead.add("d1")
                yield Stream([_noted(0, "one ", True)[:30]], EngineUnreachable("d1 is gone"))
                return
            async with super().post(url, raw, headers) as response:
                yield response

    table, engines = Table(), Half(die=set())
    start, *parts = exchange(table, engines, STREAMED)
    assert start["status"] == 200
    whole = b"".join(part["body"] for part in parts)
    assert whole.startswith(b"data: {")
    assert wire.NOTE_MARK + b"[[" not in whole
    assert whole.count(b"data: ") == len(ANSWER) + 1


@pytest.mark.parametrize("by_the_engine", [True, False])
def test_a_refusal_is_held_back_by_what_it_took(
    monkeypatch: pytest.MonkeyPatch, by_the_engine: bool
) -> None:
    class Refusing(Engines):
        async def check(self, url: str, path: str, raw: bytes) -> Checked:
            raise ApiError(400, "no such parameter")

    held: list[float] = []

    def wait_s(took_s: float) -> float:
        held.append(took_s)
        return 0.0

    monkeypatch.setattr("deployments.router.errors.wait_s", wait_s)
    body = PROMPT if by_the_engine else {**PROMPT, "model": 5}
    start, _ = exchange(Table(), Refusing(die=set()), body)
    assert start["status"] == 400
    assert len(held) == 1


def test_a_final_turn_ends_its_conversation_though_it_never_came_to_an_engine() -> None:
    table, engines = Table(), Engines(die=set(), gone={f"d{n}" for n in range(1, 9)})
    exchange(table, engines, PROMPT, headers={"x-dynamo-session-final": "true"})
    assert ("release", "c") in table.told


def test_a_decoder_that_is_lost_once_is_counted_once() -> None:
    """While it renders a prompt for a prefiller: both that and the turn find it gone."""

    class PerTurn(Table):
        async def call(self, method: str, *arguments: Any) -> Any:
            if method == "begin" and not self.lost:
                self.asked.append(method)
                return TurnPlan(TurnKey("c", 1, 1), "d9", "http://d9", "p1", "http://p1", True)
            return await super().call(method, *arguments)

    class Checking(Engines):
        async def check(self, url: str, path: str, raw: bytes) -> Checked:
            if "d9" in url:
                self._serve(url)
            return Checked([[1, 2, 3]], multimodal=False, encode_tokens=0)

    table, engines = PerTurn(), Checking(die={"d9"})
    status, headers, _ = ask(table, engines)
    assert (status, headers[b"x-conserve-decoder"]) == (200, b"d1")


@pytest.mark.parametrize(("refused_by", "forgone"), [("engine", 1), ("table", 0)])
def test_a_refused_turn_gives_its_claim_back_unless_the_table_settled_it(
    refused_by: str, forgone: int
) -> None:
    class Refusing(Engines):
        async def check(self, url: str, path: str, raw: bytes) -> Checked:
            if refused_by == "engine":
                raise ApiError(400, "no such parameter")
            return await super().check(url, path, raw)

    class Full(Table):
        async def call(self, method: str, *arguments: Any) -> Any:
            if method == "place":
                return Refusal(429, "64 conversations wait for room already", "queue_full", 5)
            return await super().call(method, *arguments)

    table = Full()
    start, _ = exchange(table, Refusing(die=set()), PROMPT)
    assert start["status"] == (400 if refused_by == "engine" else 429)
    assert [method for method, _ in table.told].count("forgo") == forgone
