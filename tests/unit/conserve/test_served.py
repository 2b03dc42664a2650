"""What vLLM would ignore or misunderstand is refused by name, or converted."""

from typing import Any

import pytest

from conserve import budget
from conserve.apis import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.errors import ApiError
from conserve.served import as_served

Json = dict[str, Any]

USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


def chat(*messages: Json, **more: Any) -> Json:
    return {"messages": [USER, *messages], **more}


def judge(body: Json, path: str) -> Json:
    budget.check(body, path)
    return as_served(body, path)


def tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def result(*content: Json) -> Json:
    told = {"type": "tool_result", "tool_use_id": "1", "content": list(content)}
    return {"role": "user", "content": [told]}


def block(role: str, **fields: Any) -> Json:
    return {"role": role, "content": [fields]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(functions=[{"name": "f"}]), "functions"),
        (CHAT, chat(function_call={"name": "f"}), "function_call"),
        (CHAT, chat(audio={"voice": "ash", "format": "wav"}), "audio"),
        (CHAT, chat(modalities=["text", "audio"]), "modalities"),
        # Without a word in it, it is a search.
        (CHAT, chat(web_search_options={}), "web_search_options"),
        (CHAT, chat(moderation={"model": "m"}), "moderation"),
        (CHAT, chat(tools=[tool("f"), {"type": "custom", "custom": {}}]), "tools[1].type"),
        (CHAT, chat({"role": "function", "name": "f", "content": "x"}), "messages[1].role"),
        (
            CHAT,
            chat({"role": "assistant", "function_call": CALL["function"]}),
            "messages[1].function_call",
        ),
        (CHAT, chat({"role": "assistant", "audio": {"id": "a"}}), "messages[1].audio"),
        (
            CHAT,
            chat({"role": "assistant", "tool_calls": [CALL, {"id": "2", "type": "custom"}]}),
            "messages[1].tool_calls[1].type",
        ),
        (MESSAGES, chat(container="c"), "container"),
        (MESSAGES, chat(container={"id": None, "skills": [{}]}), "container"),
        (MESSAGES, chat(mcp_servers=[{"url": "u"}]), "mcp_servers"),
        (MESSAGES, chat(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0].type"),
        (MESSAGES, chat(block("user", type="document")), "messages[1].content[0].type"),
        (MESSAGES, chat(block("user", **USE)), "messages[1].content[0].type"),
        (MESSAGES, chat(block("user", type="thinking")), "messages[1].content[0].type"),
        (MESSAGES, chat(block("system", type="image")), "messages[1].content[0].type"),
        (MESSAGES, chat(system=[{"type": "image"}]), "system[0].type"),
        (
            MESSAGES,
            chat(result({"type": "text", "text": "x"}, {"type": "search_result"})),
            "messages[1].content[0].content[1].type",
        ),
        (
            MESSAGES,
            chat(block("user", type="image", source={"type": "file", "file_id": "f"})),
            "messages[1].content[0].source.type",
        ),
        (
            MESSAGES,
            chat(result({"type": "image", "source": {"type": "file"}})),
            "messages[1].content[0].content[0].source.type",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(path: str, body: Json, param: str) -> None:
    for each in (path, COUNT_TOKENS) if path == MESSAGES else (path,):
        with pytest.raises(ApiError) as error:
            judge(body, each)
        assert (error.value.status, error.value.param) == (400, param)
        # Anthropic's errors have no field for it.
        assert error.value.message.startswith(param + ": ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(functions=[], function_call="none", audio=None, modalities=["text"])),
        (CHAT, chat(functions=None, function_call="auto", modalities=None)),
        (CHAT, chat({"role": "assistant", "function_call": None, "audio": None, "tool_calls": []})),
        (CHAT, chat({"role": "assistant", "tool_calls": [CALL, {**CALL, "type": None}]})),
        (MESSAGES, chat(container={"id": None, "skills": None}, mcp_servers=[])),
        (MESSAGES, chat(tools=[{"name": "f", "type": None}, {"name": "g", "type": "custom"}])),
        (MESSAGES, chat(block("assistant", type="redacted_thinking", data="x"), USER)),
        (MESSAGES, chat(block("assistant", **USE), result({"type": "tool_reference"}))),
        (COMPLETIONS, {"prompt": "x", "audio": "y"}),
        (RESPONSES, {"input": "x", "prompt": "", "context_management": {}, "conversation": []}),
        (RESPONSES, {"input": "x", "background": False, "moderation": {}}),
    ],
)
def test_what_asks_for_nothing_is_let_through(path: str, body: Json) -> None:
    judge(body, path)


def test_a_refusal_is_what_was_said() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    assert as_served(chat(refused, USER), CHAT)["messages"][1]["content"] == "no"
    kept = {**refused, "content": "but yes"}
    assert as_served(chat(kept, USER), CHAT)["messages"][1]["content"] == "but yes"


def test_thinking_is_bounded_by_the_cap_on_output_alone() -> None:
    asked = {"type": "enabled", "budget_tokens": 1024}
    served = as_served(chat(thinking=asked), MESSAGES)["thinking"]
    assert served == {**asked, "type": "adaptive"}
    for other in (None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": "x"}):
        body = chat(thinking=other)
        assert as_served(body, MESSAGES) is body


def test_a_schema_that_is_none_is_any_objects() -> None:
    def wanted(schema: Any) -> Json:
        named = {"name": "n", "strict": None, **schema}
        return chat(response_format={"type": "json_schema", "json_schema": named})

    for none in ({}, {"schema": None}):
        assert as_served(wanted(none), CHAT)["response_format"] == {"type": "json_object"}
    some = wanted({"schema": {"type": "object"}})
    assert as_served(some, CHAT) is some


@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT_TOKENS, RESPONSES, COMPLETIONS])
def test_what_is_said_as_vllm_has_it_is_not_touched(path: str) -> None:
    said = {"role": "assistant", "content": "a", "refusal": None}
    body = chat(said, USER, tool_choice="auto", tools=[{"name": "f"}])
    assert as_served(body, path) is body


def test_a_last_message_of_the_assistants_that_says_nothing_is_left_out() -> None:
    for content in ("", " \n", [], [{"type": "text", "text": ""}]):
        said = {"role": "assistant", "content": content}
        for path in (MESSAGES, COUNT_TOKENS):
            assert as_served(chat(said), path)["messages"] == [USER]
            assert as_served({"messages": [said]}, path)["messages"] == [said]
        assert as_served(chat(said), CHAT)["messages"] == [USER, said]
    for content in ("a", [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]):
        body = chat({"role": "assistant", "content": content})
        assert as_served(body, MESSAGES) is body
