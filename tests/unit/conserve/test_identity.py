"""The conversation id that a request states."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.identity import (
    BODY_FIELDS,
    HEADERS,
    MAX_ID_CHARS,
    SOURCES,
    InvalidConversationId,
    Source,
    explicit_id,
    is_final,
    is_generated,
    new_id,
    own_id,
    parent_id,
    scoped,
    tenant_of,
    within,
    without_identity,
)

STRICT = [source for source in SOURCES if source.strict]
PLAIN = [source for source in SOURCES if source.read is None]
LENIENT = [source for source in PLAIN if not source.strict]
OWN_FIELD = next(source for source in SOURCES if source.name == "conversation_id")
UUID = "57a121ec-f78c-48c3-a745-e3036a3ecc33"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


def named(source: Source) -> str:
    """A test's name; a header and a field may have the same one."""
    return f"{'body' if source.in_body else 'header'}:{source.name}"


def put(source: Source, value: object) -> tuple[dict[str, str], dict[str, Any]]:
    if not source.in_body:
        return {source.name.lower(): str(value)}, {}
    body: Any = value
    for name in reversed(source.name.split(".")):
        body = {name: body}
    return {}, body


def ask(source: Source, value: object, **more: object) -> str | None:
    headers, body = put(source, value)
    return explicit_id(headers, {**more, **body})


def refusal(source: Source, value: object) -> InvalidConversationId:
    with pytest.raises(InvalidConversationId) as caught:
        ask(source, value)
    return caught.value


def test_no_id() -> None:
    assert explicit_id({}, {}) is None
    assert explicit_id({"authorization": "Bearer x"}, {"model": "m", "user": "u"}) is None


@pytest.mark.parametrize("source", PLAIN, ids=named)
def test_every_name_is_understood_and_trimmed(source: Source) -> None:
    assert ask(source, " task 7/a \t") == "task 7/a"


def test_the_first_in_that_order_wins() -> None:
    # A stated header spares the body.
    assert explicit_id({"x-session-id": "a"}, {"conversation_id": 7}) == "a"
    headers = {name.lower(): f"header:{name}" for name in HEADERS if name != "thread-id"}
    body: dict[str, Any] = {name: f"body:{name}" for name in BODY_FIELDS}
    body |= {
        "prompt_cache_key": "body:prompt_cache_key",
        "vllm_xargs": {"agentic_context": {"program_id": "body:vllm_xargs.agentic_context"}},
        "metadata": {
            "session_id": "body:metadata.session_id",
            "user_id": "user_x_account__session_body:metadata.user_id",
        },
    }
    seen = []
    while (found := explicit_id(headers, body)) is not None:
        seen.append(found)
        where, name = found.split(":")
        if where == "header":
            del headers[name.lower()]
        else:
            *outer, last = name.split(".")
            fields = body
            for one in outer:
                fields = fields[one]
            del fields[last]
    assert seen == [named(source) for source in SOURCES if source.name != "thread-id"]


@pytest.mark.parametrize("source", SOURCES, ids=named)
@pytest.mark.parametrize("empty", ["", "  \t"])
def test_empty_is_absent(source: Source, empty: str) -> None:
    assert ask(source, empty) is None
    if source.name != "job_id":
        assert ask(source, empty, job_id="other") == "other"
        assert not source.in_body or ask(source, None, job_id="other") == "other"


@pytest.mark.parametrize(
    ("value", "kind"), [(0, "int"), (False, "bool"), ([], "list"), ({"id": "x"}, "dict")]
)
def test_body_field_must_be_a_string(value: object, kind: str) -> None:
    error = refusal(OWN_FIELD, value)
    assert error.source == "conversation_id"
    assert str(error).startswith("conversation_id must be a string of at most 256 printable ASCII")
    assert f"({kind})" in str(error)


@pytest.mark.parametrize("source", STRICT, ids=named)
def test_length_limit(source: Source) -> None:
    assert MAX_ID_CHARS == 256
    assert ask(source, "x" * 256) == "x" * 256
    assert ask(source, " " + "x" * 256 + " ") == "x" * 256
    error = refusal(source, "x" * 257)
    assert error.source == source.name
    assert source.name in str(error)
    assert "257 characters" in str(error)
    assert "at most 256" in str(error)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\nb", r'"a\nb"'),
        ("a\x00", r'"a\x00"'),
        ("\x7fa", r'"\x7fa"'),
        ("caf\xe9", r'"caf\xe9"'),
        ("\ud83d", r'"\ud83d"'),
    ],
)
@pytest.mark.parametrize("source", [SOURCES[0], OWN_FIELD], ids=named)
def test_only_printable_ascii(source: Source, value: str, shown: str) -> None:
    error = refusal(source, value)
    assert error.source == source.name
    assert shown in str(error)
    assert "256 printable ASCII" in str(error)


@pytest.mark.parametrize("source", [SOURCES[0], OWN_FIELD], ids=named)
@pytest.mark.parametrize("value", [".", "..", " .. "])
def test_an_id_that_no_url_can_hold_is_refused(source: Source, value: str) -> None:
    """`DELETE /v1/conversations/..` becomes `DELETE /v1` before it is sent."""
    assert "neither . nor .." in str(refusal(source, value))
    assert ask(source, "...") == "..."


@given(st.text(max_size=300), st.sampled_from(STRICT))
def test_an_id_is_safe_or_refused(value: str, source: Source) -> None:
    try:
        found = ask(source, value)
    except InvalidConversationId as error:
        message = str(error)
        assert message.isascii()
        assert message.isprintable()
        return
    assert found is None or re.fullmatch(r"[!-~]([ -~]{0,254}[!-~])?", found)
    assert (found or "") == value.strip()


@pytest.mark.parametrize("source", LENIENT, ids=named)
@pytest.mark.parametrize("value", ["x" * 257, "caf\xe9", "a\x00b", ".."])
def test_what_others_names_hold_is_hashed_where_it_is_no_id(source: Source, value: str) -> None:
    """Their clients may not have meant to name a conversation, so it is no error."""
    found = ask(source, value)
    assert found is not None
    assert re.fullmatch("hashed-[0-9a-f]{32}", found)
    assert ask(source, f" {value} ") == found
    assert ask(source, f"{value}!") != found


@given(JSON, st.sampled_from([source for source in SOURCES if source.in_body]))
def test_any_json_names_a_conversation_or_none(value: object, source: Source) -> None:
    try:
        found = ask(source, value)
    except InvalidConversationId:
        assert source.strict
        return
    assert found is None or re.fullmatch(r"[!-~]([ -~]{0,254}[!-~])?", found)


@given(JSON)
def test_any_json_around_a_name_is_no_error(value: object) -> None:
    for name in ("metadata", "vllm_xargs", "prompt_cache_key"):
        found = explicit_id({}, {name: value})
        assert found is None or isinstance(value, str | dict)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        (f"user_{'0f' * 32}_account__session_{UUID}", UUID),
        (json.dumps({"device_id": "0f", "account_uuid": "", "session_id": UUID}), UUID),
        # A user is no conversation.
        (f"user_{'0f' * 32}", None),
        ("0f0f-somebody", None),
        ("{", None),
        ('{"a":' * 3000, None),
        ({"session_id": UUID}, None),
    ],
)
def test_claude_codes_user_id_holds_a_session(user_id: object, session: str | None) -> None:
    assert explicit_id({}, {"metadata": {"user_id": user_id}}) == session


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ({"program_id": "task-42:researcher", "session_id": "s"}, "task-42:researcher"),
        ({"session_id": "s", "agent_id": "researcher", "task_id": "t"}, "s/researcher"),
        ({"task_id": "t", "agent_id": "a"}, "t/a"),
        ({"agent_id": "a"}, None),
        (7, None),
    ],
)
def test_an_agentic_context_names_an_agents_conversation(context: object, found: str) -> None:
    assert explicit_id({}, {"vllm_xargs": {"agentic_context": context}}) == found
    text = {"agentic_context": json.dumps(context)}
    assert explicit_id({}, {"vllm_xargs": text}) == found


def test_a_sub_agent_has_a_conversation_of_its_own() -> None:
    claude = {"x-claude-code-session-id": "s"}
    assert explicit_id(claude, {}) == "s"
    assert explicit_id({**claude, "x-claude-code-agent-id": " a1 "}, {}) == "s/a1"
    # One that names its conversation otherwise has agents too.
    assert explicit_id({"x-claude-code-agent-id": "a1"}, {"job_id": "j"}) == "j/a1"
    # Without a conversation there is nothing to be within.
    assert explicit_id({"x-claude-code-agent-id": "a1"}, {}) is None
    # A parent is not who speaks: sub-agents of opencode have their own sessions.
    headers = {"x-session-id": "child", "x-parent-session-id": "parent"}
    assert explicit_id(headers, {}) == "child"


def test_codex_says_thread_and_session() -> None:
    """Both are the same in its main thread; those of sub-agents share the session."""
    assert explicit_id({"session-id": "s", "thread-id": "s"}, {"prompt_cache_key": "s"}) == "s"
    assert explicit_id({"session-id": "s", "thread-id": "t"}, {"prompt_cache_key": "s"}) == "s/t"
    assert explicit_id({"thread-id": "t"}, {}) == "t"
    assert explicit_id({"thread-id": "t", "x-session-id": "x"}, {}) == "x"


CLAUDE_AGENT = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a2"}
CODEX_THREAD = {"session-id": "s", "thread-id": "t2"}


@pytest.mark.parametrize(
    ("headers", "parent"),
    [
        ({}, None),
        ({"x-session-id": "c"}, None),
        ({"x-session-id": "c", "x-parent-session-id": "p"}, "p"),
        ({"x-dynamo-session-id": "c", "x-dynamo-parent-session-id": "p"}, "p"),
        ({"x-conserve-parent-id": " p ", "x-parent-session-id": "other"}, "p"),
        # A conversation that is recognised by its messages has a parent if it says so.
        ({"x-parent-session-id": "p"}, "p"),
        (CLAUDE_AGENT, "s"),
        ({**CLAUDE_AGENT, "x-claude-code-parent-agent-id": "a1"}, "s/a1"),
        (CODEX_THREAD, "s"),
        ({**CODEX_THREAD, "x-codex-parent-thread-id": "t1"}, "s/t1"),
        ({**CODEX_THREAD, "x-codex-parent-thread-id": "s"}, "s"),
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1"}, "t1"),
    ],
)
def test_a_conversation_has_the_parent_that_its_client_names(
    headers: dict[str, str], parent: str | None
) -> None:
    assert parent_id(headers, {}) == parent


def test_a_parent_that_can_be_no_id_is_refused_under_our_own_name_alone() -> None:
    with pytest.raises(InvalidConversationId, match="X-ConServe-Parent-Id"):
        parent_id({"x-conserve-parent-id": "a\tb"}, {})
    other = parent_id({"x-parent-session-id": "acme\tc"}, {})
    assert other is not None
    assert other.startswith("hashed-")


IDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=256)


@given(IDS, st.text(min_size=1, max_size=300), IDS, st.text(min_size=1, max_size=300))
def test_two_agents_are_two_conversations(one: str, a: str, other: str, b: str) -> None:
    first, second = within(one, a), within(other, b)
    assert (first == second) == ((one, a) == (other, b))
    assert len(first) <= MAX_ID_CHARS
    assert first.isascii()
    assert first.isprintable()
    assert first != one


def test_an_agent_is_addressed_behind_a_slash() -> None:
    assert within("s", "a") == "s/a"
    assert within("s", "a/b%") == "s/a%2Fb%25"
    assert within("s", "..") != "s/.."
    assert re.fullmatch("x{216}/hashed-[0-9a-f]{32}", within("x" * 256, "a"))


@given(st.integers(41, 2000), st.sampled_from(["z", "\x01", "\xe9", "\U0001f600"]))
def test_a_message_shows_little_of_the_value(length: int, char: str) -> None:
    message = str(refusal(OWN_FIELD, char * length + "\x00"))
    shown = re.findall(r'"(.*)"', message)
    assert len(shown) == 1
    assert len(shown[0]) <= 40
    assert len(message) < 250


@pytest.mark.parametrize(
    ("headers", "final"),
    [
        *(({"x-dynamo-session-final": value}, True) for value in ("true", "True", " TRUE ")),
        *(({"x-dynamo-session-final": value}, False) for value in ("false", "")),
        ({}, False),
        ({"x-final": "true"}, False),
    ],
)
def test_final(headers: dict[str, str], final: bool) -> None:
    assert is_final(headers) is final


def test_without_identity() -> None:
    body = {"model": "m", "messages": [{"role": "user"}], **dict.fromkeys(BODY_FIELDS, "x")}
    before = dict(body)
    left = without_identity(body)
    assert left == {"model": "m", "messages": [{"role": "user"}]}
    left["model"] = "other"
    assert body == before


def test_what_is_the_engines_too_stays() -> None:
    body = {"metadata": {"user_id": "u"}, "prompt_cache_key": "k", "vllm_xargs": {"a": 1}}
    assert without_identity(body) == body


@pytest.mark.parametrize(
    ("extra", "left"),
    [
        ({"agentic_context": {"program_id": "p"}, "a": 1}, {"a": 1}),
        ({"agentic_context": None}, {}),
        ({"agentic_context": '{"program_id": "p"}'}, {"agentic_context": '{"program_id": "p"}'}),
        (None, None),
    ],
)
def test_an_object_that_vllm_refuses_is_left_out(extra: object, left: object) -> None:
    """VLLM takes texts, numbers and lists of them there."""
    body = {"vllm_xargs": extra}
    assert without_identity(body) == {"vllm_xargs": left}
    assert body == {"vllm_xargs": extra}


def test_a_scoped_id_gives_back_tenant_and_id_and_meets_no_other() -> None:
    kept = scoped("acme", "a/b:c")
    assert (tenant_of(kept), own_id(kept)) == ("acme", "a/b:c")
    assert kept != scoped("acm", "ea/b:c")
    # Without keys an id is kept as it is, whatever it looks like.
    assert scoped(None, "acme:x") == "acme:x"
    assert tenant_of("acme:x") is None
    assert own_id("acme:x") == "acme:x"
    # No stated id looks scoped.
    with pytest.raises(InvalidConversationId):
        explicit_id({"x-conversation-id": "acme\tx"}, {})


def test_a_generated_id_is_one_whosever_it_is() -> None:
    made = new_id()
    assert is_generated(made)
    assert is_generated(scoped("acme", made))
    assert not is_generated(scoped("acme", "task-42"))
    assert not is_generated(f"{made}x")
