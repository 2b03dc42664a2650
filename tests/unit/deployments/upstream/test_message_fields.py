"""The fields of Messages as Anthropic's clients know them, by vLLM's own server."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from conserve.apis import CHAT, MESSAGES
from tests.unit.deployments.engine.vllm_server import MODEL, Server, events, read

Json = dict[str, Any]

ASKED = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**ASKED, "stream": True}
TOOL = {"name": "look_up", "input_schema": {"type": "object", "properties": {"on": {}}}}
CALL = ["<tool_call>", '\n{"name": "look_up", "arguments"', ': {"on": true}}\n', "</tool_call>"]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def test_vllms_fields_are_those_of_chats() -> None:
    body = Server(CALL, "stop").serve(MESSAGES, {**ASKED, "tools": [TOOL]}).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["content"][0]["id"].startswith("chatcmpl-tool-")
    assert "stop_sequence" not in body
    # It had to call a tool, and has not.
    asked = {**ASKED, "tools": [TOOL], "tool_choice": {"type": "any"}}
    body = Server(["no", " call"], "stop").serve(MESSAGES, asked).json()
    assert (body["stop_reason"], body["content"][0]["type"]) == ("tool_use", "text")
    assert (
        Server().post(MESSAGES, json.dumps({**ASKED, "max_tokens": 0}).encode()).status_code == 400
    )


@pytest.mark.usefixtures("patched")
def test_nulls_are_there_and_ids_are_of_messages() -> None:
    server = Server()
    start, *_, delta, _ = events(server.serve(MESSAGES, STREAM))
    body = server.serve(MESSAGES, ASKED).json()
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert start["message"]["stop_reason"] is start["message"]["stop_sequence"] is None
    for id_ in (start["message"]["id"], body["id"]):
        assert id_.startswith("msg_")
        assert "chatcmpl" not in id_
    assert server.serve(CHAT, ASKED).json()["id"].startswith("chatcmpl-")


@pytest.mark.usefixtures("patched")
def test_a_message_of_no_tokens_is_empty() -> None:
    asked = read(MESSAGES, {**ASKED, "max_tokens": 0})
    server = Server(["on"], "stop")
    told = Message.model_validate(server.post(asked.engine_path, asked.raw).json())
    assert (told.content, told.stop_reason, told.usage.output_tokens) == ([], "max_tokens", 0)
    # Another request's is its own.
    assert server.serve(MESSAGES, ASKED).json()["content"] != []


@pytest.mark.usefixtures("patched")
def test_a_stop_sequence_is_told() -> None:
    stops = {**ASKED, "stop_sequences": ["it"]}
    server = Server(finish_reason="stop", stop_reason="it")
    body = server.serve(MESSAGES, stops).json()
    delta = events(server.serve(MESSAGES, {**stops, "stream": True}))[-2]["delta"]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "it")
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "it"}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("choice", [{"type": "tool", "name": "look_up"}, {"type": "any"}, None])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "finish_reason", "expected"),
    [
        (CALL, "stop", "tool_use"),
        (["no", " call"], "stop", "end_turn"),
        (["no", " call"], "length", "max_tokens"),
    ],
)
def test_why_an_answer_ended_is_said_as_anthropic_says_it(
    choice: Json | None, stream: bool, answer: list[str], finish_reason: str, expected: str
) -> None:
    """However vLLM's parsers have come to a call, or to none."""
    server = Server(answer, finish_reason)
    more = {"tools": [TOOL]} if choice is None else {"tools": [TOOL], "tool_choice": choice}
    response = server.serve(MESSAGES, {**ASKED, **more, "stream": stream})
    if stream:
        told = [EVENT.validate_python(event) for event in events(response)]
        blocks = [event.content_block for event in told if event.type == "content_block_start"]
        assert told[-2].delta.stop_reason == expected
        arguments = [event.delta for event in told if event.type == "content_block_delta"]
        given = "".join(getattr(delta, "partial_json", "") for delta in arguments)
        assert (given == '{"on": true}') == (answer is CALL)
    else:
        message = Message.model_validate(response.json())
        blocks = list(message.content)
        assert message.stop_reason == expected
    assert [block.type for block in blocks] == ["tool_use" if answer is CALL else "text"]
    for block in blocks:
        assert block.type == "text" or block.id.startswith("toolu_")
