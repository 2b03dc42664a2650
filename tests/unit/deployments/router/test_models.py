"""Several models behind one door: which one gets a request, and what is told of all."""

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from conserve.cache_account import Spent
from conserve.settings import Settings, load
from conserve.tenants import KeyFile, keyfile
from deployments import answers, messages
from deployments.messages import EventPage
from deployments.router.frontdoor import FrontDoor
from deployments.tables import Tables
from tests.unit.deployments import asgi
from tests.unit.deployments.router.test_operators import Listener
from tests.unit.deployments.stub_table import StubTable, listed_engine

TWO = {
    "big": {"model": "embedded", "aliases": ["claude-*"]},
    "small": {"model": "embedded", "aliases": ["claude-haiku-*"]},
}
CHAT = "/v1/chat/completions"


def a_door(
    settings: Settings | None = None, **answer: Any
) -> tuple[FrontDoor, dict[str, StubTable]]:
    """Return a door to two models, whose tables refuse each turn; and these tables."""
    refusal = messages.Refusal(429, "no room", "no_room", 5)
    of = {
        name: StubTable(
            **{
                "begin": refusal,
                "observe": None,
                "engines": [listed_engine(f"e-{name}")],
                **{method: told[name] for method, told in answer.items()},
            }
        )
        for name in TWO
    }
    tables: dict[str, Any] = {**of}
    return FrontDoor(settings or load({"models": TWO}), Tables(tables), "router"), of


def asked_of(of: dict[str, StubTable]) -> list[str]:
    return [name for name, table in of.items() if any(one[0] == "begin" for one in table.asked)]


@pytest.mark.parametrize(
    ("model", "gets"),
    [("big", "big"), ("claude-opus-4", "big"), ("claude-haiku-4-5", "small"), ("small", "small")],
)
@pytest.mark.parametrize("coding", ["identity", "deflate"])
def test_a_turn_goes_to_the_model_that_it_names(model: str, gets: str, coding: str) -> None:
    door, of = a_door()
    # Half a surrogate pair, which is no JSON to strict readers.
    for text in ("hi", "\ud83d"):
        body = json.dumps({"model": model, "prompt": [1, 2], "user": text}).encode()
        body = zlib.compress(body) if coding == "deflate" else body
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = asgi.ask(door, "POST", "/v1/completions", content=body, headers=headers)
        assert (answer.status_code, asked_of(of)) == (429, [gets])


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"model": "llama", "messages": []}', 404, "use 'big' or 'small'"),
        (b'{"messages": []}', 404, "say which model"),
        (b'{"model": 5, "messages": []}', 400, "model must be a string"),
        (b"[1]", 400, "JSON object"),
        (b'{"model": ', 400, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_what_names_no_model_is_refused(path: str, body: bytes, status: int, says: str) -> None:
    door, of = a_door()
    headers = {"content-type": "application/json"}
    answer = asgi.ask(door, "POST", path, content=body, headers=headers)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert not asked_of(of)


def test_a_default_takes_what_names_none() -> None:
    door, of = a_door(load({"models": TWO, "default_model": "small"}))
    for name in ({}, {"model": "llama"}):
        asgi.ask(door, "POST", "/v1/completions", json={"prompt": [1], **name})
    assert asked_of(of) == ["small"]


def test_a_key_that_is_limited_reaches_its_model_alone(tmp_path: Path) -> None:
    content, key = KeyFile.new().with_key("acme", "2026-12-01", models=("small",))
    content, other = content.with_key("acme", "2026-12-01", models=("gone",))
    keyfile.write(tmp_path / "keys.json", content)
    door, of = a_door(load({"models": TWO, "keys_file": str(tmp_path / "keys.json")}))

    def ask(method: str, path: str, key: str = key, **given: Any) -> httpx.Response:
        return asgi.ask(door, method, path, headers={"x-api-key": key}, **given)

    assert [one["id"] for one in ask("GET", "/v1/models").json()["data"]] == ["small"]
    assert ask("GET", "/v1/models/big").status_code == 404
    refused = ask("POST", CHAT, json={"model": "claude-opus", "messages": []})
    assert (refused.status_code, "'big'" in refused.text) == (404, False)
    turn = {"model": "claude-haiku-4", "prompt": [1]}
    assert ask("POST", "/v1/completions", json=turn).status_code == 429
    assert asked_of(of) == ["small"]
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        listed = asgi.ask(door, "GET", "/v1/models", headers={"x-api-key": other, **headers})
        assert listed.json()["data"] == []
    refused = ask("POST", "/v1/completions", other, json=turn)
    assert (refused.status_code, "another key" in refused.text) == (404, True)


def test_models_are_listed_in_both_forms() -> None:
    door, _ = a_door()
    assert [one["id"] for one in asgi.ask(door, "GET", "/v1/models").json()["data"]] == [*TWO]
    theirs = asgi.ask(door, "GET", "/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert (theirs.json()["first_id"], theirs.json()["last_id"]) == ("big", "small")
    assert asgi.ask(door, "GET", "/v1/models/claude-haiku-9").json()["id"] == "small"


def a_conversation(used: int, **more: Any) -> answers.Conversation:
    history = answers.History(
        phase="acting", turns=2, held_tokens=10, shared_tokens=0, decoder="d", moves=0, age_s=1.0,
        idle_s=0.0, last_turn=None, hints={}, called=None, running_tools=[],
    )  # fmt: skip
    given: dict[str, Any] = {
        "id": "c", "phase": "acting", "parent": None, "children": [], "children_total": 0,
        "turns": 2, "held_tokens": 10, "decoder": "d", "moves": 0, "ttfet_s": 0.5,
        "created": used - 5, "age_s": 5.0, "last_used": used, "idle_s": 0.0, "last_turn": None,
        "energy_estimate_j": None, "running_tools": 0, "histories": [history],
        "histories_total": 1, "events": [{"kind": "end", "at": float(used)}],
    }  # fmt: skip
    return answers.Conversation(**given | more)


def test_a_conversation_is_shown_with_all_its_models() -> None:
    found = {
        "big": a_conversation(100, decoder="b"),
        "small": a_conversation(200, decoder="s", phase="reasoning"),
    }
    door, of = a_door(conversation=found, release={"big": False, "small": True})
    shown = asgi.ask(door, "GET", "/v1/conversations/c").json()
    assert [one["model"] for one in shown["histories"]] == ["small", "big"]
    assert (shown["turns"], shown["held_tokens"], shown["created"]) == (4, 20, 95)
    assert (shown["phase"], shown["decoder"]) == ("reasoning", "s")
    assert [one["at"] for one in shown["events"]] == [200.0, 100.0]
    assert asgi.ask(door, "DELETE", "/v1/conversations/c").json()["deleted"]
    assert all(table.asked[-1][0] == "release" for table in of.values())


def test_conversations_are_listed_together_and_the_newest_first() -> None:
    def listed(*conversations: answers.Conversation) -> bytes:
        data = [msgspec.structs.replace(one, events=msgspec.UNSET) for one in conversations]
        return msgspec.json.encode(answers.Conversations(data, len(data)))

    both = {
        "big": listed(a_conversation(100), a_conversation(90, id="other")),
        "small": listed(a_conversation(300)),
    }
    door, _ = a_door(conversations=both)
    shown = asgi.ask(door, "GET", "/v1/conversations").json()
    assert shown["total"] == 2
    assert [(one["id"], one["turns"]) for one in shown["data"]] == [("c", 4), ("other", 2)]


def test_engines_say_their_model_and_metrics_have_it_as_a_label() -> None:
    text = (
        b"# HELP conserve_turns_total Turns.\n# TYPE conserve_turns_total counter\n"
        b'conserve_turns_total{outcome="completed"} %d.0\n'
        b"# HELP conserve_table_up Up.\n# TYPE conserve_table_up gauge\nconserve_table_up 1.0\n"
        b'# HELP b B.\n# TYPE b gauge\nb{model="own"} 1.0\n'
    )
    door, _ = a_door(metrics={"big": text % 3, "small": text % 4})
    engines = asgi.ask(door, "GET", "/v1/engines").json()["data"]
    assert [(one["id"], one["model"]) for one in engines] == [
        ("e-big", "big"),
        ("e-small", "small"),
    ]
    assert asgi.ask(door, "GET", "/metrics").text.splitlines() == [
        "# HELP conserve_turns_total Turns.",
        "# TYPE conserve_turns_total counter",
        'conserve_turns_total{model="big",outcome="completed"} 3.0',
        'conserve_turns_total{model="small",outcome="completed"} 4.0',
        "# HELP conserve_table_up Up.",
        "# TYPE conserve_table_up gauge",
        'conserve_table_up{model="big"} 1.0',
        'conserve_table_up{model="small"} 1.0',
        *("# HELP b B.", "# TYPE b gauge", *['b{model="own"} 1.0'] * 2),
    ]


def test_health_is_of_all_and_says_which_one_is_not_served() -> None:
    alive = {"big": answers.Alive(1, 2), "small": answers.Alive(1, 0, {"loading": 1})}  # type: ignore[dict-item]
    door, _ = a_door(health=alive)
    told = asgi.ask(door, "GET", "/health")
    assert told.status_code == 503
    assert told.json() == {
        "prefillers": 2, "decoders": 2, "starting": {"loading": 1}, "status": "unavailable",
        "models": {"big": "ok", "small": "unavailable"},
    }  # fmt: skip
    # The other one serves turns.
    door.probes.heard(True, "big")
    door.probes.heard(False, "small")
    assert asgi.ask(door, "GET", "/ready").status_code == 200


def test_computed_tokens_are_added_up_by_cause() -> None:
    def told(tokens: int) -> answers.Cache:
        cause = answers.CacheCause(
            "first", "first prompts", tokens, 1.0, 1, Spent().seconds, None, "none"
        )
        return answers.Cache("m", 60, tokens, 0, [cause], {"curl": {"first": tokens}}, {})

    door, _ = a_door(cache={"big": told(30), "small": told(10)})
    both = asgi.ask(door, "GET", "/v1/cache").json()
    assert (both["model"], both["tokens"], both["clients"]) == (
        "big, small",
        40,
        {"curl": {"first": 40}},
    )
    assert [(one["tokens"], one["turns"], one["share"]) for one in both["causes"]] == [(40, 2, 1.0)]
    assert asgi.ask(door, "GET", "/v1/cache?model=small").json()["tokens"] == 10
    # Their tokens are not of one tokenizer, so a recording is of one.
    assert asgi.ask(door, "GET", "/v1/recording").status_code == 400


async def test_events_of_all_come_in_one_stream_that_goes_on_where_it_was() -> None:
    pages = {name: [EventPage(7, 0, [])] for name in TWO}
    pages["small"].append(EventPage(9, 0, [(9, "end", b'{"number":9}')]))

    def of(name: str) -> Any:
        async def told(query: messages.EventQuery) -> EventPage:
            if pages[name]:
                return pages[name].pop(0)
            return await asgi.receiver()()  # It waits.

        return told

    door, tables = a_door(events={name: of(name) for name in TWO})
    listener = await Listener(door, "after=0").until(lambda one: "event: end" in one.text)
    event = 'id: 7-9\nevent: end\ndata: {"model":"small","number":9}'
    assert event in listener.text.split("\n\n")
    await listener.leave()
    again = await Listener(door, last_event_id="7-9").until(lambda one: one.text)
    await again.leave()
    assert [table.asked[-1][1].after for table in tables.values()] == [7, 9]
    refused = await Listener(door, "after=1-2-3").until(lambda one: one.text)
    assert refused.status == 400


async def test_a_log_that_cannot_be_followed_ends_the_stream_however_busy_another_is() -> None:
    async def busy(query: messages.EventQuery) -> EventPage:
        await asyncio.sleep(0.01)
        number = (query.after or 0) + 1
        return EventPage(number, 0, [(number, "end", b'{"number":1}')])

    door, _ = a_door(events={"big": ValueError("broken"), "small": busy})
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(Listener(door).served, 10)
