"""A last message of the assistant's in Messages, by vLLM's own server."""

from typing import Any

import pytest

from conserve import wire
from conserve.apis import CHAT, COUNT_TOKENS, MESSAGES
from conserve.errors import ApiError
from deployments.upstream.message_prefill import NO_PREFILL
from tests.unit.deployments.engine.vllm_server import MODEL, Server, events, read

Json = dict[str, Any]

HELLO = {"role": "user", "content": "hello"}
# The embedded model's template, from where an answer begins.
OPEN = "<|im_start|>assistant\n"


def ask(*messages: Json, **more: Any) -> Json:
    return {"model": MODEL, "max_tokens": 9, "messages": list(messages), **more}


def said(content: Any) -> Json:
    return {"role": "assistant", "content": content}


def test_vllm_closes_a_last_message_of_the_assistants() -> None:
    server = Server()
    server.serve(MESSAGES, ask(HELLO, said("I say")))
    assert server.prompt.endswith(f"I say<|im_end|>\n{OPEN}")


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
def test_what_is_counted_and_what_is_prefilled_is_what_is_continued() -> None:
    server = Server()
    asked = read(MESSAGES, ask(HELLO, said("I say")))
    server.serve(MESSAGES, ask(HELLO, said("I say")))
    checked = server.post(wire.CHECK_PREFIX + MESSAGES, asked.raw).json()
    assert checked["prompts"] == server.prompts
    counted = server.post(COUNT_TOKENS, asked.raw).json()
    assert counted["input_tokens"] == len(server.prompts[0])


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("content", ["", " ", [], [{"type": "text", "text": ""}]])
def test_an_empty_last_message_is_none(content: Any) -> None:
    server = Server()
    server.serve(MESSAGES, ask(HELLO))
    server.serve(MESSAGES, ask(HELLO, said(content)))
    assert server.prompts[0] == server.prompts[1]
    assert server.prompt.endswith(OPEN)
    assert read(MESSAGES, ask(HELLO, said(content))).chain == read(MESSAGES, ask(HELLO)).chain


@pytest.mark.usefixtures("patched")
def test_other_messages_are_closed_as_ever() -> None:
    server = Server()
    server.serve(MESSAGES, ask(HELLO, said("I say"), HELLO))
    assert server.prompt.endswith(f"I say<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n{OPEN}")
    server.serve(CHAT, ask(HELLO, said("I say")))
    assert server.prompt.endswith(f"I say<|im_end|>\n{OPEN}")


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
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


@pytest.mark.usefixtures("patched")
def test_an_answer_that_was_cut_is_known_when_it_is_continued() -> None:
    server = Server(answer=["I", " say"])
    server.serve(MESSAGES, ask(HELLO))
    assert server.knows(MESSAGES, ask(HELLO, said("I say")))
    # A chat closes it, and what follows is another message.
    assert not server.knows(CHAT, ask(HELLO, said("I say")))
