"""A chat's choice of tools, in the form that engines know."""

from typing import Any

import pytest

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.errors import ApiError
from conserve.served import resolved

Json = dict[str, Any]


def tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = [tool("read"), tool("write"), tool("run")]


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *tools: Any) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def refusal(choice: Any, tools: Any = TOOLS) -> ApiError:
    with pytest.raises(ApiError) as raised:
        resolved(CHAT, {"messages": [], "tools": tools, "tool_choice": choice})
    assert raised.value.status == 400
    assert len(raised.value.message) < 300
    return raised.value


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_tools_that_are_allowed_are_sent_alone(mode: str) -> None:
    body = {
        "messages": [],
        "tools": TOOLS,
        "tool_choice": allowed(mode, named("run"), named("read")),
    }
    # In the order of the tools: that is how they stand in the prompt.
    sent = resolved(CHAT, body)
    assert sent == {"messages": [], "tools": [tool("read"), tool("run")], "tool_choice": mode}
    assert body["tools"] == TOOLS
    # Where all are allowed, the history is the one that it was without the choice.
    everything = allowed(mode, *map(named, ("run", "read", "write")))
    sent = resolved(CHAT, {"tools": TOOLS, "tool_choice": everything})
    assert sent == {"tools": TOOLS, "tool_choice": mode}


@pytest.mark.parametrize(
    "choice", [None, "auto", "none", "required", "odd", 5, named("read"), {}, {"type": 5}]
)
def test_what_engines_know_or_refuse_stays_as_it_is(choice: Any) -> None:
    body = {"messages": [], "tools": TOOLS, "tool_choice": choice}
    assert resolved(CHAT, body) is body
    assert resolved(CHAT, {"messages": []}) == {"messages": []}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, "/v1/completions"])
def test_other_apis_have_words_of_their_own(path: str) -> None:
    body = {"tool_choice": allowed("auto", named("read")), "tools": TOOLS}
    assert resolved(path, body) is body


@pytest.mark.parametrize("kind", ["custom", "web_search", "mcp"])
def test_a_choice_that_cannot_be_served_is_refused_by_name(kind: str) -> None:
    error = refusal({"type": kind, kind: {"name": "read"}})
    assert (error.code, error.param) == ("unsupported_value", "tool_choice.type")
    assert repr(kind) in error.message
    assert "allowed_tools" in error.message


@pytest.mark.parametrize(
    ("choice", "where", "says"),
    [
        ({"type": "allowed_tools"}, "", "an object"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named("read")]}, "", "an object"),
        (allowed("none", named("read")), ".mode", "auto or required"),
        (allowed(["auto"], named("read")), ".mode", "auto or required"),
        (allowed("auto"), ".tools", '"none"'),
        (allowed("auto", "read"), ".tools[0]", '"function"'),
        (allowed("auto", named("read"), {"type": "function", "name": "run"}), ".tools[1]", "name"),
        (allowed("auto", {"type": "custom", "custom": {"name": "x"}}), ".tools[0].type", "custom"),
        (allowed("auto", named("read"), named("erase")), ".tools", "'erase'"),
    ],
)
def test_what_is_wrong_with_it_is_said_where_it_is(choice: Json, where: str, says: str) -> None:
    error = refusal(choice)
    assert error.param == "tool_choice.allowed_tools" + where
    assert error.message.startswith(error.param)
    assert says in error.message


@pytest.mark.parametrize("tools", [None, {}, "read"])
def test_there_must_be_tools_to_allow_some_of(tools: Any) -> None:
    assert refusal(allowed("auto", named("read")), tools).param == "tools"
    assert "'read'" in refusal(allowed("auto", named("read")), [5, {}, {"function": 5}]).message
