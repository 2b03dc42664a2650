"""A turn's way past engines and table that fail, without either."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from conserve import identity, wire
from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, form_of
from conserve.errors import ApiError
from conserve.tenants import Limits
from conserve.turn import TurnKey, TurnStats
from conserve.wire import Emitted
from deployments.messages import Checked, CountingEngine, Refusal, RouterHeard, TurnPlan, TurnTenant
from tests.unit.deployments import asgi
from tests.unit.deployments.router.fakes import (
    ANSWER,
    PROMPT,
    STREAMED,
    FakeEngines,
    FakeTable,
    Keys,
    ask,
    endpoint_of,
    exchange,
    told_by,
)
from tests.unit.deployments.table import virtual_time

EIGHT = {f"d{number}" for number in range(1, 9)}


@pytest.mark.parametrize(
    ("prefillers", "engines", "served", "lost", "ends"),
    [
        # A turn outlives the engine that it was on.
        (0, {"die": {"d1"}}, ["d1", "d2"], ["d1"], (200, None)),
        # A prompt that two engines were lost with is given to no third; a prefiller counts, too.
        (0, {"die": EIGHT}, ["d1", "d2"], ["d1", "d2"], (500, "engines_lost")),
        (1, {"die": {"p1", "d1"}}, ["p1", "d1"], ["p1", "d1"], (500, "engines_lost")),
        (2, {"die": {"d1", "p2"}}, ["p1", "d1", "p2"], ["d1", "p2"], (500, "engines_lost")),
        # One that lives and cannot be reached is no lost one.
        (0, {"die": {"d1", "d2"}, "live": True}, ["d1", "d2", "d3"], [], (200, None)),
        # A whole node is lost; that its engines are, routers find out one by one.
        (
            3,
            {"gone": {"p1", "d1", "p2", "d2"}},
            ["p3", "d3"],
            ["p1", "d1", "p2", "d2"],
            (200, None),
        ),
        (0, {"gone": EIGHT}, [], ["d1", "d2", "d3"], (503, "engine_lost")),
    ],
)
def test_a_turn_outlives_engines_that_did_not_die_of_it(
    prefillers: int,
    engines: dict[str, Any],
    served: list[str],
    lost: list[str],
    ends: tuple[int, str | None],
) -> None:
    table, there = FakeTable(prefillers=prefillers), FakeEngines(**engines)
    status, headers, body = ask((table, there))
    assert (status, body.get("error", {}).get("code")) == ends
    assert (there.served, table.lost) == (served, lost)
    # OpenAI's clients would send it again, twice, on any other 5xx.
    assert headers.get("x-should-retry") == ("false" if ends[0] == 500 else None)
    if status == 200:
        assert headers["x-conserve-decoder"] == served[-1]
    # Each turn that was placed is given back, and the last one only if it was not served.
    assert len(table.told_of("abandon")) == len(table.placed) - (status == 200)


def test_a_lost_engine_counts_no_further_prompt() -> None:
    table, engines = FakeTable(), FakeEngines({"p9"})
    endpoint = endpoint_of(table, engines)
    endpoint.hear(RouterHeard([], [CountingEngine("p9", "http://p9", 1000)], True))
    for _ in range(2):
        assert ask(endpoint)[0] == 200
    assert table.lost == ["p9"]
    # The table knows another.
    assert engines.counted == ["http://p9", "http://tokenizer", "http://tokenizer"]


def test_engines_that_the_last_beat_named_count_prompts_by_turns() -> None:
    endpoint = endpoint_of(FakeTable(), engines := FakeEngines())
    counters = [CountingEngine(name, f"http://{name}") for name in ("p1", "p2")]
    endpoint.hear(RouterHeard([], counters, True))
    for _ in range(3):
        assert ask(endpoint)[0] == 200
    assert engines.counted == ["http://p1", "http://p2", "http://p1"]


def test_a_client_is_told_which_of_its_tools_and_fields_are_left_out() -> None:
    function = {"type": "function", "name": "f"}
    group = {"type": "namespace", "name": "n", "description": "", "tools": [
        function, {"type": "custom", "name": "c"}]}  # fmt: skip
    tools = [function, {"type": "web_search"}, {"type": "web_search"}, group]
    engines = FakeEngines()
    body = {"input": "x", "tools": tools, "keep_alive": 5, "think": False}
    _, headers, _ = ask((FakeTable(), engines), body, RESPONSES)
    assert headers["x-conserve-unserved-tools"] == "web_search,custom"
    assert headers["x-conserve-ignored-fields"] == "keep_alive,think"
    assert [tool["type"] for tool in engines.got[-1][1]["tools"]] == ["function", "namespace"]
    _, headers, _ = ask((FakeTable(), engines), {"input": "x"}, RESPONSES)
    assert not {"x-conserve-unserved-tools", "x-conserve-ignored-fields"} & headers.keys()


@pytest.mark.parametrize("look_up", [False, True])
@pytest.mark.parametrize("parks", [False, True])
def test_decoders_are_told_what_lmcache_is_to_be_asked_and_given(
    look_up: bool, parks: bool
) -> None:
    engines = FakeEngines()
    assert ask((FakeTable(plan={"looks_up": look_up, "parks": parks}), engines))[0] == 200
    told = told_by(engines.got[-1][0])
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
    engines = FakeEngines()
    forged = {wire.TURN_HEADER: wire.DecoderTurn(resume_s=99, last=True).header()}
    exchange((FakeTable(), engines), headers={**forged, **given})
    told = told_by(engines.got[-1][0])
    assert (told.resume_s, told.last) == (resume_s, last)


def test_engines_get_the_tenants_salt_and_nothing_of_its_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path, Limits(turns=3))
    generated = identity.new_id()
    table = FakeTable(prefillers=1, id=identity.scoped("acme", generated))
    engines = FakeEngines()
    both = {"x-api-key": keys.acme} | keys.of_acme["headers"]
    status, headers, _ = ask((table, engines), **keys.of_acme | {"headers": both})
    assert status == 200
    # The client knows nothing of scopes.
    assert headers["x-conversation-id"] == generated
    (_, prefill), (sent, decode) = engines.got
    assert prefill["cache_salt"] == decode["cache_salt"] == keys.content.cache_salt("acme")
    assert keys.acme not in json.dumps([sent, decode, prefill])
    assert not {name.lower() for name in sent} & {"authorization", "x-api-key"}
    key = told_by(sent).key
    assert key is not None
    assert key.history_id == table.id
    assert [one.tenant for one in (*table.begun, *table.placed)] == [
        TurnTenant("acme", Limits(turns=3))
    ] * 2
    (timing,) = table.told_of("observe")
    assert timing.tenant == "acme"


@pytest.mark.parametrize("multimodal", [True, False])
def test_a_prefiller_gets_images_with_the_turn_that_has_them(multimodal: bool) -> None:
    engines = FakeEngines(checked=Checked([[1, 2, 3]], multimodal, 0))
    assert ask((FakeTable(prefillers=1), engines))[0] == 200
    (_, prefill), (_, decode) = engines.got
    assert ("prefill", CHAT if multimodal else COMPLETIONS) in engines.asked
    if multimodal:
        assert prefill == decode
    else:
        assert prefill == {"model": decode["model"], "prompt": [1, 2, 3], "max_tokens": 1}


@pytest.mark.parametrize(("agent", "more"), [("claude-cli/2.1", wire.ROOM_LEFT), ("other/1", "")])
def test_every_engine_is_told_that_what_room_there_is_will_do(agent: str, more: str) -> None:
    """Also one that gets images, and judges the turn once more."""
    engines = FakeEngines(checked=Checked([[1, 2, 3]], True, 0))
    asked = {**PROMPT, "max_tokens": 32_000}
    exchange((FakeTable(prefillers=1), engines), asked, headers={"user-agent": agent})
    assert engines.asked == [(what, CHAT + more) for what in ("check", "prefill", "post")]


@pytest.mark.parametrize(
    ("prefillers", "die", "found", "told"),
    [
        (1, (), 2, 2),
        (1, (), 0, 0),
        (1, (), None, None),
        (0, (), 2, None),
        # Of an earlier prefill it is not told: the next plan is without a prefiller.
        (1, ("d1",), 1, None),
    ],
)
def test_a_decoder_is_told_what_the_prefiller_had_found(
    prefillers: int, die: tuple[str, ...], found: int | None, told: int | None
) -> None:
    engines = FakeEngines(
        die, prefilled=TurnStats(prefilled_tokens=3, prefiller_cached_tokens=found)
    )
    exchange((FakeTable(prefillers), engines), PROMPT, headers={"user-agent": "agent/1"})
    stats = told_by(engines.got[-1][0]).stats
    assert (stats.prefiller_cached_tokens, stats.client) == (told, "agent")


def test_a_turn_that_was_let_in_is_held_to_no_limit_again(tmp_path: Path) -> None:
    """What its tenant has begun since must not cut it off."""
    table = FakeTable(id=identity.scoped("acme", "task"))
    assert ask((table, FakeEngines({"d1"})), **Keys(tmp_path).of_acme)[0] == 200
    for asked in (table.begun, table.placed):
        assert [one.tenant and one.tenant.name for one in asked] == ["acme", None]


def test_every_chat_is_recognised_by_its_messages() -> None:
    """A conversation that was named too: it may have several histories."""
    for history_id in ("task-42", identity.scoped("acme", identity.new_id())):
        engines = FakeEngines()
        ask((FakeTable(id=history_id), engines))
        ((sent, _),) = engines.got
        assert told_by(sent).beginning


@pytest.mark.parametrize("continue_streams", [True, False])
@pytest.mark.parametrize("body", [PROMPT, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("says", [True, False])
def test_the_table_is_told_what_a_turn_took_wherever_it_ran(
    says: bool, body: dict[str, Any], continue_streams: bool
) -> None:
    """Its log has a line for each; see `deployments/table/lines.py`."""
    done = TurnStats(600, 4, 0, 512, engine_queued_s=0.1, engine_prefill_s=0.2, decode_s=0.3)
    summary = done if says else None
    both = table, _ = FakeTable(prefillers=1), FakeEngines(summary=summary)
    named = {"x-request-id": "mine"}
    exchange(both, body, headers=named, continue_streams=continue_streams)
    timing = table.told[-1][1]
    assert (timing.outcome, timing.request_id, timing.error) == ("completed", "mine", None)
    assert (timing.decoder_id, timing.prefiller_id) == ("d1", "p1")
    assert timing.placement == "home"
    assert timing.lmcache_tokens == (512 if says else 0)
    here = {"recognition", "wait", "count", "prefill", "decode"}
    assert set(timing.phases or {}) == here | ({"handoff"} if says else set())


def test_a_turn_that_is_refused_names_the_error_and_not_its_text() -> None:
    table = FakeTable()
    body = {"messages": "no list"}
    exchange((table, FakeEngines()), body, headers={"x-request-id": "mine"})
    (timing,) = table.told_of("observe")
    assert (timing.outcome, timing.request_id) == ("refused", "mine")
    exchange((table, FakeEngines(EIGHT)))
    timing = table.told[-1][1]
    assert (timing.outcome, timing.error) == ("failed", "engines_lost")


@pytest.mark.parametrize(("prefill_s", "given_back_s"), [(60.0, 0.0), (0.0, 10.0)])
def test_a_turn_whose_client_leaves_is_given_back(prefill_s: float, given_back_s: float) -> None:
    """At once; or later if a decoder has it, which tells of its end itself."""
    table, engines = FakeTable(prefillers=1), FakeEngines(scripts=[[60]], prefill_s=prefill_s)
    parts = [asgi.receiver(STREAMED)]

    async def receive() -> Any:
        if parts:
            return await parts.pop()()
        await asyncio.sleep(1)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    async def leave() -> None:
        await endpoint_of(table, engines)(asgi.scope_of(path=CHAT), receive, send)
        assert bool(table.told_of("abandon")) == (not given_back_s)
        await asyncio.sleep(given_back_s)

    virtual_time.run(leave())
    assert table.told_of("abandon") == [TurnKey("c", 1, 1)]
    assert [one.turn for one in table.told_of("prefilled")] == table.told_of("abandon")
    assert [one.outcome for one in table.told_of("observe")] == ["cancelled"]
    # Else the decoder would take its router for dead.
    assert [one.router_id for _, one in engines.left] == (["router"] if given_back_s else [])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_turn_that_comes_again_rejoins_or_is_placed(is_there: bool) -> None:
    """Nothing is counted, prefilled or encoded for an answer that is there."""
    table, engines = FakeTable(prefillers=2), FakeEngines()
    table.plan = {"rejoins": True}
    if not is_there:
        engines.forgot = table.plan.clear
    start, *_ = exchange((table, engines), STREAMED)
    assert start["status"] == 200
    first, *others = [told_by(headers) for _, headers in engines.posted]
    assert (first.rejoins, len(first.digest)) == (True, 16)
    assert [(one.rejoins, one.digest) for one in others] == ([] if is_there else [(False, b"")])
    assert ("prefill" in dict(engines.asked)) is not is_there
    assert [one.refused_by for one in table.placed] == ([None] if is_there else [None, "d1"])


# --- streams ------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
DEAD = b'data: {"error":{"code":"dead"}}\n\n'


def _streamed(table: FakeTable, engines: FakeEngines, **settings: Any) -> tuple[str, list[Any]]:
    """The text of a streamed answer, and the events that hold none."""
    start, *parts = exchange((table, engines), STREAMED, **settings)
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
@pytest.mark.parametrize("last_words", [b"", DEAD, DEAD + DONE])
def test_a_stream_outlives_its_decoder(after: int, last_words: bytes) -> None:
    table, engines = FakeTable(), FakeEngines(after={"d1": after}, last_words=last_words)
    assert _streamed(table, engines) == ("".join(ANSWER), ["done"])
    assert (engines.served, table.lost) == (["d1", "d2"], ["d1"])
    # The second one is told what the client has, and under which name it was given.
    body, headers = engines.posted[1]
    size = told_by(headers).sent_bytes
    assert wire.read_notes(body[:size]) == [Emitted([number]) for number in range(after)]
    assert body[size:] == engines.posted[0][0]
    assert headers["x-request-id"] == "x"
    # And room is found for all of it: the prompt's three tokens, and these.
    assert [one.prompt_tokens for one in table.placed] == [3, 3 + after]
    # Which are the first prompt, and more than that.
    assert [one.chain.ends_with_root for one in table.placed] == [True, False]  # type: ignore[union-attr]
    (timing,) = table.told_of("observe")
    assert (timing.outcome, timing.continued) == ("completed", 1)


REFUSED = b'data: {"error":{"code":"refused"}}\n\n' + DONE


@pytest.mark.parametrize(
    ("engines", "continues", "said", "others", "served"),
    [
        # The engine died with the prompt: the answer's status had been sent, and nothing of it.
        *(({"after": {"d1": 0}, "last_words": DEAD + DONE}, continues,
           "".join(ANSWER), ["done"], ["d1", "d2"]) for continues in (True, False)),
        ({"after": {"d1": 1, "d2": 2}}, True, "one two ", ["engines_lost"], ["d1", "d2"]),
        # An error of a decoder that lives is its answer.
        *(({"after": {"d1": after}, "last_words": REFUSED, "live": True}, continues,
           said, ["refused", "done"], ["d1"])
          for after, said in ((2, "one two "), (0, "")) for continues in (True, False)),
        # One that cannot go on, or is not to, ends in an error.
        ({"after": {"d1": 2}, "notes": False}, True, "one two ", ["engine_lost"], ["d1"]),
        ({"after": {"d1": 2}}, False, "one two ", ["engine_lost"], ["d1"]),
    ],
)  # fmt: skip
def test_how_a_stream_ends_whose_decoder_does_not_go_on(
    engines: dict[str, Any], continues: bool, said: str, others: list[Any], served: list[str]
) -> None:
    table, there = FakeTable(), FakeEngines(**engines)
    assert _streamed(table, there, continue_streams=continues) == (said, others)
    assert there.served == served
    assert table.lost == ([] if there.live else served[: len(there.after)])
    assert len({*table.told_of("abandon")}) == len(served) - (others == ["done"])
    told = [told_by(headers) for _, headers in there.posted]
    assert [one.notes for one in told] == [continues] * len(served)
    if said != "one two ":
        assert not any(one.sent_bytes for one in told)


@pytest.mark.parametrize("continues", [True, False])
def test_a_refusal_in_a_streams_first_event_gets_its_status(continues: bool) -> None:
    error = b'data: {"error":{"message":"no such token","param":"logit_bias","code":400}}\n\n'

    def refusing(after: int) -> FakeEngines:
        return FakeEngines(after={"d1": after}, last_words=error + DONE, live=True)

    table = FakeTable()
    status, _, body = ask((table, refusing(0)), STREAMED, continue_streams=continues)
    assert status == 400
    told = body["error"]
    assert (told["message"], told["param"]) == ("no such token", "logit_bias")
    assert told["type"] == "invalid_request_error"
    assert len(table.told_of("abandon")) == 1
    # Once something has been sent, the status cannot be had back.
    answer = _streamed(FakeTable(), refusing(2), continue_streams=continues)
    assert answer == ("one two ", [400, "done"])


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(503, "no engine is ready", "unavailable", 5),
        Refusal(429, "64 conversations wait for room already", "queue_full", 5),
    ],
)
def test_a_stream_waits_for_a_decoder_where_there_is_none_or_none_with_room(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setattr("deployments.router.turn._REPLACEMENT_POLL_S", 0.0)
    refusals = [refusal] * 4
    table = FakeTable(
        answers={"begin": lambda at: refusals.pop() if at.lost and refusals else None}
    )
    assert _streamed(table, FakeEngines(after={"d1": 2})) == ("".join(ANSWER), ["done"])
    assert refusals == []


# --- streams that wait ----------------------------------------------------------------------------

# Bodies of streamed turns, and the beginning of an event with output.
ASKED = {
    CHAT: (STREAMED, b""),
    COMPLETIONS: ({"prompt": "hello", "stream": True}, b""),
    MESSAGES: ({**STREAMED, "max_tokens": 9}, b"event: content_block_delta\n"),
    RESPONSES: ({"input": "hello", "stream": True}, b"event: response.x.delta\n"),
}


def waiting(slow: bool = True, wait_s: int = 40, refusal: Refusal | None = None) -> FakeTable:
    """Return a table that may take long, and knows no engine for a while after a loss."""
    none_yet = [Refusal(503, "no engine is ready", "unavailable", 5)] * 3

    async def answer(table: FakeTable) -> Refusal | None:
        if table.lost and none_yet:
            return none_yet.pop()
        if slow:
            await asyncio.sleep(wait_s)
            return refusal
        return None

    return FakeTable(answers={"begin": answer})


# 1 and 2 are events with output, ( and ) the halves of the first, ~ is silence of 7 s, k a comment
# or ping of the router's, c and p are the engine's own, and E ends a stream.
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("slow", "decoders", "got"),
    [
        (True, ["12E"], "kk12E"),
        (False, ["~~1~~2~~E"], "12E"),
        (False, ["~~~~~~1~~~~~~2~~~E"], "kk1kk2kE"),
        (False, ["(~~~~~~)2E"], "kk12E"),
        (False, ["~c~p~~1p2E"], "k12E"),
        (False, ["~~~", "12E"], "k12E"),
        (False, ["~(~~", "12E"], "k12E"),
        (False, ["c", "12E"], "12E"),
    ],
)
def test_a_stream_is_never_silent_for_long(
    path: str, slow: bool, decoders: list[str], got: str
) -> None:
    body, begins = ASKED[path]
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    kept_alive = ping if path == MESSAGES else b": keep-alive\n\n"
    one, end = begins + b"data: {1}\n\n", form_of(path).ends[0].strip() + b"\n\n"
    sent = {"1": one, "2": one.replace(b"1", b"2"), "(": one[:8], ")": one[8:], "E": end}
    sent |= {"k": kept_alive, "c": b": processing\n\n", "p": ping}
    scripts = [[sent.get(part, 7) for part in script] for script in decoders]
    both = table, _ = waiting(slow), FakeEngines(scripts=scripts)
    named = {"x-conversation-id": "c"}
    start, *parts = exchange(both, body, path, named, run=virtual_time.run)
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
    refusal = Refusal(429, "no room in time", "queue_timeout", 5)
    both = table, _ = waiting(wait_s=wait_s, refusal=refusal), FakeEngines()
    body = {**ASKED[path][0], "stream": stream}
    start, *alive, told = exchange(both, body, path, run=virtual_time.run)
    begun = stream and wait_s > 15
    assert (start["status"], len(alive)) == ((200, 2) if begun else (429, 0))
    assert (b"retry-after" in dict(start["headers"])) == (not begun)
    error = json.loads(told["body"].rpartition(b"data: ")[2])
    error = error.get("error", error)
    assert error["message"] == "no room in time"
    assert error.get("code", error["type"]) in ("queue_timeout", "rate_limit_error")
    assert [given.outcome for given in table.told_of("observe")] == ["refused"]


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by_the_engine", [True, False])
def test_a_refusal_is_held_back_by_what_it_took(
    monkeypatch: pytest.MonkeyPatch, by_the_engine: bool
) -> None:
    held: list[float] = []

    def wait_s(took_s: float) -> float:
        held.append(took_s)
        return 0.0

    monkeypatch.setattr("deployments.router.errors.wait_s", wait_s)
    refusing = FakeEngines(checked=ApiError(400, "no such parameter"))
    body = PROMPT if by_the_engine else {**PROMPT, "model": 5}
    assert ask((FakeTable(), refusing), body)[0] == 400
    assert len(held) == 1


def test_a_final_turn_ends_its_conversation_though_it_never_came_to_an_engine() -> None:
    both = table, _ = FakeTable(), FakeEngines(gone=EIGHT)
    exchange(both, headers={"x-dynamo-session-final": "true"})
    assert ("release", "c") in table.told


def test_a_decoder_that_is_lost_once_is_counted_once() -> None:
    """While it renders a prompt for a prefiller: both that and the turn find it gone."""
    plan = TurnPlan(TurnKey("c", 1, 1), "d9", "http://d9", "p1", "http://p1", True)
    table = FakeTable(answers={"begin": lambda at: None if at.lost else plan})
    status, headers, _ = ask((table, FakeEngines(die={"d9"})))
    assert (status, headers["x-conserve-decoder"]) == (200, "d1")
