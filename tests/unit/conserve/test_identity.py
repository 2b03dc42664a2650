"""The conversation id that a request states."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.identity import (
    BODY_FIELDS,
    HEADERS,
    MAX_ID_CHARS,
    InvalidConversationId,
    explicit_id,
    is_final,
    is_generated,
    new_id,
    own_id,
    scoped,
    tenant_of,
    without_identity,
)

SOURCES = [*HEADERS, *BODY_FIELDS]


def ask(source: str, value: object, **more: object) -> str | None:
    """explicit_id of a request with ``value`` in one header or body field, and ``more`` fields."""
    if source in HEADERS:
        return explicit_id({source.lower(): str(value)}, more)
    return explicit_id({}, {source: value, **more})


def refusal(source: str, value: object) -> InvalidConversationId:
    with pytest.raises(InvalidConversationId) as caught:
        ask(source, value)
    return caught.value


def test_no_id() -> None:
    assert explicit_id({}, {}) is None
    assert explicit_id({"authorization": "Bearer x"}, {"model": "m", "user": "u"}) is None


@pytest.mark.parametrize("source", SOURCES)
def test_every_name_is_understood_and_trimmed(source: str) -> None:
    assert ask(source, " task 7/a \t") == "task 7/a"


def test_names_are_these_in_this_order() -> None:
    headers = {name.lower(): f"id-{name}" for name in HEADERS}
    body = {name: f"id-{name}" for name in BODY_FIELDS}
    seen = []
    while (found := explicit_id(headers, body)) is not None:
        name = found.removeprefix("id-")
        seen.append(name)
        (headers if name in HEADERS else body).pop(name.lower())
    assert seen == [
        "X-Conversation-Id",
        "x-session-id",
        "session-id",
        "X-Dynamo-Session-ID",
        "x-claude-code-session-id",
        "X-SMG-Routing-Key",
        "conversation_id",
        "program_id",
        "session_id",
        "job_id",
    ]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("empty", ["", "  \t"])
def test_empty_is_absent(source: str, empty: str) -> None:
    assert ask(source, empty) is None
    if source != "job_id":
        assert ask(source, empty, job_id="other") == "other"


def test_null_body_field_is_absent() -> None:
    assert ask("conversation_id", None, job_id="other") == "other"


def test_a_stated_header_spares_the_body() -> None:
    assert explicit_id({"x-session-id": "a"}, {"conversation_id": 7}) == "a"


@pytest.mark.parametrize(
    ("value", "kind"),
    [(7, "a number"), (0, "a number"), (1.5, "a number"), (False, "a boolean"),
     ([], "an array"), ({"id": "x"}, "an object")],
)  # fmt: skip
def test_body_field_must_be_a_string(value: object, kind: str) -> None:
    error = refusal("program_id", value)
    assert error.source == "program_id"
    assert f"program_id must be a string of at most 256 characters, not {kind}" in str(error)


@pytest.mark.parametrize("source", SOURCES)
def test_length_limit(source: str) -> None:
    assert MAX_ID_CHARS == 256
    assert ask(source, "x" * 256) == "x" * 256
    assert ask(source, " " + "x" * 256 + " ") == "x" * 256
    error = refusal(source, "x" * 257)
    assert error.source == source
    assert source in str(error)
    assert "257 characters" in str(error)
    assert "limit is 256" in str(error)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("a\nb", "control character U+000A at position 2"),
        ("a\x00", "control character U+0000 at position 2"),
        ("\x7fa", "control character U+007F at position 1"),
        ("a\u200bb", "control character U+200B at position 2"),
        ("caf\xe9", "non-ASCII character U+00E9 at position 4"),
        ("a\u2028b", "non-ASCII character U+2028 at position 2"),
        ("\ud83d", "non-ASCII character U+D83D at position 1"),
    ],
)
@pytest.mark.parametrize("source", ["X-Conversation-Id", "session_id"])
def test_only_printable_ascii(source: str, value: str, problem: str) -> None:
    error = refusal(source, value)
    assert error.source == source
    assert problem in str(error)
    assert "256 printable ASCII" in str(error)


@pytest.mark.parametrize("source", ["X-Conversation-Id", "session_id"])
@pytest.mark.parametrize("value", [".", "..", " .. "])
def test_an_id_that_no_url_can_hold_is_refused(source: str, value: str) -> None:
    """`DELETE /v1/conversations/..` becomes `DELETE /v1` before it is sent."""
    assert "must not be" in str(refusal(source, value))
    assert ask(source, "...") == "..."


@given(st.text(max_size=300), st.sampled_from(SOURCES))
def test_an_id_is_safe_or_refused(value: str, source: str) -> None:
    try:
        found = ask(source, value)
    except InvalidConversationId as error:
        message = str(error)
        assert message.isascii()
        assert message.isprintable()
        return
    assert found is None or re.fullmatch(r"[!-~]([ -~]{0,254}[!-~])?", found)
    assert (found or "") == value.strip()


@given(st.integers(41, 2000), st.sampled_from(["z", "\x01", "\xe9", "\U0001f600"]))
def test_a_message_shows_little_of_the_value(length: int, char: str) -> None:
    message = str(refusal("job_id", char * length + "\x00"))
    shown = re.findall(r'"(.*)"', message)
    assert len(shown) == 1
    assert len(shown[0]) <= 40
    assert len(message) < 250


@pytest.mark.parametrize("value", ["true", "True", "TRUE", " true "])
def test_final(value: str) -> None:
    assert is_final({"x-dynamo-session-final": value})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-dynamo-session-final": "false"},
        {"x-dynamo-session-final": ""},
        {"x-final": "true"},
    ],
)
def test_not_final(headers: dict[str, str]) -> None:
    assert not is_final(headers)


def test_without_identity() -> None:
    body = {"model": "m", "messages": [{"role": "user"}], **dict.fromkeys(BODY_FIELDS, "x")}
    before = dict(body)
    assert without_identity(body) == {"model": "m", "messages": [{"role": "user"}]}
    assert body == before


def test_without_identity_gives_a_copy() -> None:
    body = {"model": "m"}
    without_identity(body)["model"] = "other"
    assert body == {"model": "m"}


def test_new_ids_are_valid_and_differ() -> None:
    ids = {new_id() for _ in range(1000)}
    assert all(map(is_generated, ids))
    assert not any(map(is_generated, ("conv-1", "task-42", "conv-" + "x" * 24)))
    assert len(ids) == 1000
    for one in ids:
        assert re.fullmatch(r"conv-[0-9a-f]{24}", one)
        assert explicit_id({"x-conversation-id": one}, {}) == one


def test_a_scoped_id_gives_back_tenant_and_id_and_meets_no_other() -> None:
    kept = scoped("acme", "a/b:c")
    assert (tenant_of(kept), own_id(kept)) == ("acme", "a/b:c")
    assert kept != scoped("acm", "ea/b:c")
    # Without keys an id is kept as it is, whatever it looks like.
    assert scoped(None, "acme:x") == "acme:x"
    assert tenant_of("acme:x") is None
    assert own_id("acme:x") == "acme:x"


def test_no_stated_id_looks_scoped() -> None:
    with pytest.raises(InvalidConversationId):
        explicit_id({"x-conversation-id": "acme\tx"}, {})


def test_a_generated_id_is_one_whosever_it_is() -> None:
    made = new_id()
    assert is_generated(made)
    assert is_generated(scoped("acme", made))
    assert not is_generated(scoped("acme", "task-42"))
    assert not is_generated(f"{made}x")
