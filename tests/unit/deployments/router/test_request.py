"""What a request may be, before anything is asked of an engine or the table."""

import asyncio
import json
from typing import Any

import pytest

from conserve import budget, wire
from conserve.errors import ApiError
from conserve.hints import Hints
from conserve.settings import Settings, load
from conserve.tenants.keyfile import Caller
from conserve.tenants.limits import Limits
from deployments.messages import TurnTenant
from deployments.router.request import ClientRequest
from tests.unit.deployments.asgi import read_turn

SETTINGS = Settings()


def read(
    body: Any,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    **more: Any,
) -> ClientRequest:
    return read_turn(path, body, headers=headers, **more)


def refused(body: Any, headers: dict[str, str] | None = None) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(body, headers=headers)
    assert error.value.status == 400
    assert len(error.value.message) < 300
    return error.value


def test_the_handoff_is_not_for_clients_to_direct_by_either_way() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "kv_transfer_params": {"do_remote_decode": True},
        "ec_transfer_params": {"peer_host": "elsewhere"},
        "vllm_xargs": {"kv_transfer_params": "anything", "ec_transfer_params": {}, "mine": 1},
    }
    sent = json.loads(read(body).raw)
    assert not {"kv_transfer_params", "ec_transfer_params"} & sent.keys()
    assert sent["vllm_xargs"] == {"mine": 1}
    assert json.loads(read({**body, "vllm_xargs": "odd"}).raw)["vllm_xargs"] == "odd"


HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": "conserve-embedded"}])
def test_a_request_that_names_no_model_gets_the_one_that_is_served(given: dict[str, Any]) -> None:
    asked = read({**HELLO, **given})
    assert asked.model == asked.body["model"] == json.loads(asked.raw)["model"]
    assert asked.model == "conserve-embedded"


def test_what_the_client_says_of_its_conversation_comes_along() -> None:
    """And what is the engine's too, or others', goes on to the engine as it came."""
    body = {
        **HELLO,
        "metadata": {"user_id": "user_0f_account__session_mine"},
        "nvext": {"agent_hints": {"priority": 3}},
        "prompt_cache_key": 7,
        "vllm_xargs": {"agentic_context": {"expected_resume": False}, "mine": 1},
    }
    asked = read(body, headers={"X-ConServe-Deadline-S": "20", "x-claude-code-agent-id": "a"})
    assert asked.explicit_id == "mine/a"
    assert asked.hints == Hints(priority=3, deadline_s=20, last_step=True, parent="mine")
    assert not asked.final  # Nobody acts on a hint.
    sent = json.loads(asked.raw)
    # vLLM takes no objects there.
    assert sent.pop("vllm_xargs") == {"mine": 1}
    del body["vllm_xargs"]
    assert sent == {**body, "model": "conserve-embedded"}
    assert asked.body == json.loads(asked.raw)


def test_a_client_is_known_by_its_product() -> None:
    known = {"claude-cli/2.1 (external)": "claude-cli", "a" * 100: "a" * 40, "<b>": None, "": None}
    assert {one: read(HELLO, headers={"user-agent": one}).client for one in known} == known


def test_a_priority_is_read_and_goes_on_only_to_an_engine_that_takes_it() -> None:
    body = {**HELLO, "priority": 5}
    asked = read(body)
    assert asked.hints == Hints(priority=-5)
    assert "priority" not in json.loads(asked.raw)
    by_priority = load({"engine": {"scheduling_policy": "priority"}})
    assert json.loads(read(body, settings=by_priority).raw)["priority"] == 5
    assert read({**HELLO, "service_tier": "flex"}).hints.background
    assert not read({**HELLO, "service_tier": "default"}).hints.background


def test_a_key_of_the_background_has_no_turn_elsewhere() -> None:
    caller = Caller("acme", False, Limits(), "salt", background=True, weight=3)
    for given in ({}, {"X-ConServe-Priority": "7"}):
        asked = read(HELLO, headers=given, **{"conserve.caller": caller})
        assert asked.hints.priority == -1
        assert asked.tenant == TurnTenant("acme", Limits(), 3)
    asked = read(HELLO, headers={"X-ConServe-Priority": "-7"}, **{"conserve.caller": caller})
    assert asked.hints.priority == -7


def test_a_parent_is_the_tenant_s_own() -> None:
    caller = Caller("acme", False, Limits(), "salt")
    asked = read(HELLO, headers={"X-Parent-Session-Id": "p"}, **{"conserve.caller": caller})
    assert asked.hints.parent == "acme\tp"


def test_a_hint_of_ours_that_is_none_is_refused() -> None:
    error = refused(HELLO, headers={"X-ConServe-Priority": "high"})
    assert (error.code, error.param) == ("invalid_hint", "X-ConServe-Priority")
    assert "whole number" in error.message
    assert read({**HELLO, "priority": "high", "nvext": []}).hints == Hints()


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{not json", None, None),
        (b'"a string"', None, None),
        (b"\xff\xfe", None, None),
        (b"[" * 100_000, None, None),
        ({"messages": "x"}, None, "messages"),
        ({**HELLO, "n": "many"}, None, "n"),
        ({**HELLO, "model": 3}, None, "model"),
        ({**HELLO, "max_tokens": -1}, None, "max_tokens"),
        ({**HELLO, "session_id": 5}, "invalid_conversation_id", "session_id"),
        ({**HELLO, "job_id": "a\nb"}, "invalid_conversation_id", "job_id"),
    ],
)
def test_a_bad_body_is_named(body: Any, code: str | None, param: str | None) -> None:
    error = refused(body)
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize("bad", ["x" * 10_000, "tab\there", "caf\u00e9"])
def test_an_id_that_could_not_be_routed_by_is_refused(bad: str) -> None:
    """And not echoed whole."""
    error = refused(HELLO, headers={"X-Conversation-Id": bad})
    assert (error.code, error.param) == ("invalid_conversation_id", "X-Conversation-Id")


def test_another_model_is_not_there() -> None:
    with pytest.raises(ApiError) as error:
        read({**HELLO, "model": "other"})
    assert (error.value.status, error.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("pad", [0, 100_000], ids=["small", "large"])
def test_a_body_is_refused_for_what_it_holds(pad: int) -> None:
    """In a thread too, where it is large."""
    error = refused({"messages": [{"role": "user", "content": [5]}], "x": "x" * pad})
    assert "objects and strings" in error.message
    assert error.param == "messages"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "gb18030"])
def test_what_is_not_utf_8_is_refused(encoding: str) -> None:
    """Python would read it; but in it, half of a character can pass for the end of a string."""
    assert (
        "UTF-8"
        in refused('{"messages": [{"role": "user", "content": "∀"}]}'.encode(encoding)).message
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_what_is_not_changed_is_passed_on_as_it_came(encoding: str) -> None:
    """Strings of megabytes are not written anew for a name that is taken out."""
    text = (
        ' { "conversation_id" : "mine", "messages": [{"role": "user", "content": "é \\u00e9"}]\n,'
        '"seed": 1, "temperature": 1.50, "kv_transfer_params": {}, "a\\"}": "\\ud83d\\ude00",'
        '"x": null,'
        '"seed":1234567890123456789, "vllm_xargs": {"kv_transfer_params": 1, "b": 2} } '
    )
    asked = read(text.encode(encoding))
    assert asked.explicit_id == "mine"
    assert asked.raw.decode() == (
        '{"messages":[{"role": "user", "content": "é \\u00e9"}],'
        '"seed":1234567890123456789,"temperature":1.50,"a\\"}":"\\ud83d\\ude00","x":null,'
        '"vllm_xargs":{"b": 2},"model":"conserve-embedded"}'
    )


@pytest.mark.parametrize(
    ("agent", "cap", "takes_what_there_is"),
    [
        ("claude-cli/2.1.105 (external, cli)", {"max_tokens": 32_000}, True),
        ("claude-cli/2.1.105 (external, sdk-py, agent-sdk/0.1.59)", {"max_tokens": 64_000}, True),
        ("claude-code/2.1.45", {"max_tokens": 32_000}, True),
        ("opencode/1.2.0", {"max_completion_tokens": 32_000}, True),
        ("opencode/1.2.0", {"max_output_tokens": 32_000}, True),
        # What somebody has set is what is wanted.
        ("claude-cli/2.1.105 (external, cli)", {"max_tokens": 31_999}, False),
        ("claude-cli/2.1.105 (external, cli)", {}, False),
        ("opencode/1.2.0", {"max_tokens": 64_000}, False),
        # Whose default it is, is not known.
        ("Anthropic/Python 0.82.0", {"max_tokens": 32_000}, False),
        ("not claude-cli/2", {"max_tokens": 32_000}, False),
        (None, {"max_tokens": 32_000}, False),
    ],
)
def test_a_known_clients_default_takes_what_room_there_is(
    agent: str | None, cap: dict[str, int], takes_what_there_is: bool
) -> None:
    headers = {} if agent is None else {"User-Agent": agent}
    asked = read({**HELLO, **cap}, "/v1/messages", headers)
    more = wire.ROOM_LEFT if takes_what_there_is else ""
    assert asked.engine_path == "/v1/messages" + more
    assert asked.path == "/v1/messages"
    # What engines get says the same as before: they know how much room there is.
    assert json.loads(asked.raw).items() >= cap.items()


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    def asked(half: str) -> ClientRequest:
        said = {"role": "user", "content": f"cut {half}"}
        return read({"messages": [said], "stop": [half], "user": half})

    cut, whole = asked("\ud83d"), asked("\ufffd")
    assert cut.body == json.loads(cut.raw) == whole.body
    assert cut.chain == whole.chain


def test_the_table_gets_the_newest_ends() -> None:
    messages: list[dict[str, str]] = []
    for turn in range(100):
        messages += [{"role": "user", "content": f"{turn}"}, {"role": "assistant", "content": "a"}]
    messages.append({"role": "user", "content": "last"})
    chain = read({"messages": messages}).chain
    assert chain is not None
    assert len(chain.ends) == 64
    # The longest beginning is the one that the last answer ends.
    shorter = read({"messages": messages[:-2]}).chain
    assert shorter is not None
    assert chain.ends[1:] == shorter.ends[:63]
    assert chain.root == shorter.root


def test_a_number_that_no_engine_can_hand_on_is_refused() -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert refused({"messages": hello, "stream_interval": 2**64}).param == "stream_interval"


@pytest.mark.parametrize(("pieces", "slept_s"), [(1, 0.0), (4, 0.0), (5, 0.0), (36, 31 / 256)])
def test_a_long_body_comes_no_faster_than_it_costs(
    pieces: int, slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 256 KiB on, at 16 MiB a second: others' tokens are passed on in between."""
    sleeps: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay_s: float) -> None:
        sleeps.append(delay_s)
        await sleep(0)

    monkeypatch.setattr("deployments.router.reading.asyncio.sleep", counted)
    piece = b"x" * (64 * 1024)
    raw = b'{"messages": [{"role": "user", "content": "' + piece * pieces
    raw = raw[: len(piece) * pieces - 4] + b'"}]}'
    parts = [raw[at : at + len(piece)] for at in range(0, len(raw), len(piece))]
    request = read_turn("/v1/chat/completions", *parts)
    assert request.body["messages"] == json.loads(raw)["messages"]
    assert sum(sleeps) == pytest.approx(slept_s)


def _tool(name: str, text: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text}}


def _allowing(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def test_an_engine_gets_the_tools_that_a_choice_allows_and_the_history_is_of_these() -> None:
    """The prompt is another one than with all of them, so no other's KV is to be found for it."""
    tools = [_tool("read"), _tool("write")]
    some = read({**HELLO, "tools": tools, "tool_choice": _allowing("required", "write")})
    sent = json.loads(some.raw)
    assert sent == some.body
    assert sent["tools"] == [_tool("write")]
    assert sent["tool_choice"] == "required"
    same = read({**HELLO, "tools": [_tool("write")], "tool_choice": "required"})
    assert some.chain == same.chain
    both = read({**HELLO, "tools": tools, "tool_choice": _allowing("auto", "write", "read")})
    assert both.chain == read({**HELLO, "tools": tools}).chain != some.chain


def test_tools_that_a_choice_leaves_out_make_no_grammar() -> None:
    tools = [_tool("read"), _tool("write", "x" * budget.MOST_TOOL_CHARS)]
    assert read({**HELLO, "tools": tools, "tool_choice": _allowing("required", "read")})
    assert read({**HELLO, "tools": tools, "tool_choice": _allowing("auto", "write")})
    error = refused({**HELLO, "tools": tools, "tool_choice": _allowing("required", "write")})
    assert error.param == "tools"


def test_a_request_that_is_sent_again_has_the_same_digest() -> None:
    """What names one attempt, or its connection, does not count."""
    headers = {"authorization": "Bearer one", "x-conversation-id": "c", "x-request-id": "1"}
    other = {"x-request-id": "2", "user-agent": "other", "x-stainless-retry-count": "1"}
    one, again = read(HELLO, headers=headers), read(HELLO, headers={**headers, **other})
    assert one.digest == again.digest
    # A completion without an id is a conversation of its own each time, and the same request.
    once = {"prompt": "x", "max_tokens": 3}
    two = [read(once, "/v1/completions") for _ in range(2)]
    assert two[0].digest == two[1].digest
    assert two[0].explicit_id != two[1].explicit_id
