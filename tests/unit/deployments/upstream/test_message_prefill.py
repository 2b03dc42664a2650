"""Messages as Anthropic's clients know them, by vLLM's own server."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from conserve import wire
from conserve.apis import CHAT, COUNT_TOKENS, MESSAGES
from conserve.errors import ApiError
from deployments.engine.messages import NO_PREFILL
from tests.unit.deployments.engine.vllm_server import MODEL, Server, events, read

Json = dict[str, Any]

HELLO = {"role": "user", "content": "hello"}
# The embedded model's template, from where an answer begins.
OPEN = "<|im_start|>assistant\n"
TOOL = {"name": "look_up", "input_schema": {"type": "object", "properties": {"on": {}}}}


def ask(*messages: Json, **more: Any) -> Json:
    return {"model": MODEL, "max_tokens": 9, "messages": list(messages), **more}


def said(content: Any) -> Json:
    return {"role": "assistant", "content": content}


# --- What a stream says -------------------------------------------------------------------------


@pytest.mark.parametrize("prefilled", [None, 0, 2])
def test_a_stream_says_the_same_of_caches_in_its_first_event_as_in_its_last(
    prefilled: int | None,
) -> None:
    """And as a body does. Of what a prefiller has just computed, nothing was found."""
    read_tokens = 3 if prefilled is None else prefilled
    server = Server(cached_tokens=3)
    asked = ask(HELLO, stream=True)
    streamed = server.serve(MESSAGES, asked, prefill_cached_tokens=prefilled)
    start, *_, delta, stop = events(streamed)
    assert (start["type"], delta["type"], stop["type"]) == (
        "message_start", "message_delta", "message_stop",
    )  # fmt: skip
    body = server.serve(MESSAGES, ask(HELLO), prefill_cached_tokens=prefilled).json()
    prompt_tokens = len(server.prompts[0])
    expected = {
        "input_tokens": prompt_tokens - 3,
        "cache_read_input_tokens": read_tokens,
        "cache_creation_input_tokens": 3 - read_tokens,
    }
    assert start["message"]["usage"] == {**expected, "output_tokens": 0}
    assert delta["usage"] == body["usage"] == {**expected, "output_tokens": 2}


def test_nulls_are_there_and_ids_are_of_messages() -> None:
    server = Server()
    start, *_, delta, _ = events(server.serve(MESSAGES, ask(HELLO, stream=True)))
    body = server.serve(MESSAGES, ask(HELLO)).json()
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert start["message"]["stop_reason"] is start["message"]["stop_sequence"] is None
    for id_ in (start["message"]["id"], body["id"]):
        assert id_.startswith("msg_")
        assert "chatcmpl" not in id_
    chat = server.serve(CHAT, ask(HELLO)).json()
    assert chat["id"].startswith("chatcmpl-")


def test_a_stop_sequence_is_told() -> None:
    stops = ask(HELLO, stop_sequences=["it"])
    server = Server(finish_reason="stop", stop_reason="it")
    body = server.serve(MESSAGES, stops).json()
    delta = events(server.serve(MESSAGES, {**stops, "stream": True}))[-2]["delta"]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "it")
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "it"}


EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALL = ["<tool_call>", '\n{"name": "look_up", "arguments"', ': {"on": true}}\n', "</tool_call>"]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "look_up"}, {"type": "any"}, None])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "finish_reason", "expected"),
    [
        (CALL, "stop", "tool_use"),
        # It may have been the first of two.
        (CALL, "length", "max_tokens"),
        ([*CALL[:2], ': {"on": tr'], "length", "max_tokens"),
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
    response = server.serve(MESSAGES, ask(HELLO, **more, stream=stream))
    if stream:
        told = [EVENT.validate_python(event) for event in events(response)]
        blocks = [event.content_block for event in told if event.type == "content_block_start"]
        assert told[-2].delta.stop_reason == expected
    else:
        message = Message.model_validate(response.json())
        blocks = list(message.content)
        assert message.stop_reason == expected
    for block in blocks:
        assert block.type == "text" or block.id.startswith("toolu_")


@pytest.mark.parametrize(
    ("arguments", "left"),
    [('{"on": true}', {"on": True}), ('{"on": [1, 2', {"on": [1, 2]}), ("", {}), ("[1", {})],
)
def test_half_a_call_is_an_answer_that_was_cut_off(arguments: str, left: Json) -> None:
    """Of a parser that has one; vLLM takes its arguments for JSON."""
    function = {"name": "look_up", "arguments": arguments}
    called = {"id": "1", "type": "function", "function": function}
    choice = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [called]}}
    chat = ChatCompletionResponse(
        id="chatcmpl-1",
        model=MODEL,
        choices=[{**choice, "finish_reason": "length"}],
        usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    )
    body = Server().messages.messages_full_converter(chat).model_dump(exclude_none=True)
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert body["content"] == [{"type": "tool_use", "id": "1", "name": "look_up", "input": left}]


# --- A last message of the assistant's ------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("I say", "I say"),
        ("I say ", "I say "),
        ([{"type": "text", "text": "I say"}], "I say"),
        ([{"type": "text", "text": "I"}, {"type": "text", "text": "say"}], "say"),
        ([{"type": "thinking", "thinking": "hm", "signature": "s"},
          {"type": "text", "text": "I say"}], "I say"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_last_message_of_the_assistants_is_continued(
    content: Any, end: str, stream: bool
) -> None:
    server = Server(answer=[" on", " it"])
    response = server.serve(MESSAGES, ask(HELLO, said(content), stream=stream))
    assert server.prompt.endswith(end)
    assert server.prompt.count(OPEN) == 1
    # The answer is what comes behind it.
    if stream:
        texts = [one["delta"].get("text", "") for one in events(response) if "delta" in one]
        assert "".join(texts) == " on it"
    else:
        assert response.json()["content"] == [{"type": "text", "text": " on it"}]


def test_what_is_counted_and_what_is_prefilled_is_what_is_continued() -> None:
    server = Server()
    asked = read(MESSAGES, ask(HELLO, said("I say")))
    server.serve(MESSAGES, ask(HELLO, said("I say")))
    checked = server.post(wire.CHECK_PREFIX + MESSAGES, asked.raw).json()
    assert checked["prompts"] == server.prompts
    counted = server.post(COUNT_TOKENS, asked.raw).json()
    assert counted["input_tokens"] == len(server.prompts[0])


@pytest.mark.parametrize("content", ["", " ", [], [{"type": "text", "text": ""}]])
def test_an_empty_last_message_is_none(content: Any) -> None:
    server = Server()
    server.serve(MESSAGES, ask(HELLO))
    server.serve(MESSAGES, ask(HELLO, said(content)))
    assert server.prompts[0] == server.prompts[1]
    assert server.prompt.endswith(OPEN)
    assert read(MESSAGES, ask(HELLO, said(content))).chain == read(MESSAGES, ask(HELLO)).chain


def test_other_messages_are_closed_as_ever() -> None:
    server = Server()
    server.serve(MESSAGES, ask(HELLO, said("I say"), HELLO))
    assert server.prompt.endswith(f"I say<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n{OPEN}")
    server.serve(CHAT, ask(HELLO, said("I say")))
    assert server.prompt.endswith(f"I say<|im_end|>\n{OPEN}")


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (
            [{"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {}}],
            {},
            "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: "
            "toolu_1.",
        ),
        (
            [{"type": "thinking", "thinking": "hm", "signature": "s"}],
            {},
            "messages.1: The final block in an assistant message cannot be `thinking`.",
        ),
        (
            "{",
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_as_by_anthropic(
    content: Any, more: Json, words: str
) -> None:
    with pytest.raises(ApiError) as error:
        read(MESSAGES, ask(HELLO, said(content), **more))
    assert error.value.status == 400
    assert words in error.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_model_that_cannot_continue_says_so_as_anthropics_do(
    stream: bool, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    render = server.online.render_chat

    async def closed(request: Any, **options: Any) -> Any:
        """As renderers do that have no template, of gpt-oss and DeepSeek."""
        request.add_generation_prompt = request.continue_final_message
        request.continue_final_message = False
        return await render(request, **options)

    if ignored:
        monkeypatch.setattr(server.online, "render_chat", closed)
    else:
        template = "{% for one in messages %}{{ one.content[:1] }}{% endfor %}"
        monkeypatch.setattr(server.online, "chat_template", template)
    response = server.serve(MESSAGES, ask(HELLO, said("I say"), stream=stream))
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(NO_PREFILL)
    assert server.prompts == []
    assert server.serve(MESSAGES, ask(HELLO, stream=stream)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [MESSAGES, CHAT])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_history_is_known_whose_answer_was_continued(
    path: str, stream: bool, blocks: bool
) -> None:
    """Whether its client keeps what was begun and what was answered as one message, or as two."""
    server = Server(answer=[" on", " it"])
    more = {"continue_final_message": True, "add_generation_prompt": False} if path == CHAT else {}
    begun = [{"type": "text", "text": "I say"}] if blocks else "I say"
    server.serve(path, ask(HELLO, said(begun), stream=stream, **more))
    next_ = {"role": "user", "content": "go on"}
    assert server.knows(path, ask(HELLO, said("I say on it"), next_))
    assert server.knows(path, ask(HELLO, said("I say"), said(" on it"), next_))
    assert not server.knows(path, ask(HELLO, said("I say"), next_))
    assert not server.knows(path, ask(HELLO, said("on it"), next_))


def test_an_answer_that_was_cut_is_known_when_it_is_continued() -> None:
    server = Server(answer=["I", " say"])
    server.serve(MESSAGES, ask(HELLO))
    assert server.knows(MESSAGES, ask(HELLO, said("I say")))
    # A chat closes it, and what follows is another message.
    assert not server.knows(CHAT, ask(HELLO, said("I say")))


def test_bodies_of_other_kinds_stay_errors() -> None:
    server = Server()
    response = server.post(MESSAGES, json.dumps({"model": MODEL, "messages": []}).encode())
    assert response.status_code == 400
