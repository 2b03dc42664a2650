"""How long a dialogue's system part is, as an engine counts it."""

import asyncio
import json
from typing import Any

import pytest

from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from conserve.errors import ApiError
from conserve.recognition import chain_of
from conserve.recognition.apis import heard
from deployments.messages import Checked
from deployments.router.prompt import CountedPrompt, SystemLengths, counted_as_sent
from deployments.router.request import ClientRequest
from deployments.router.upstream import EngineUnreachable

SYSTEM = "be brief " * 60
MODEL = "conserve-embedded"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tokens_of(chat: dict[str, Any]) -> list[int]:
    """A template of a token a character: tools, then each message behind its role."""
    text = json.dumps(chat.get("tools") or [])
    text += "".join(f"<{one['role']}>{one['content']}" for one in chat["messages"])
    return [ord(one) for one in text + "<assistant>"]


class Engine:
    """Renders chats, or does not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.checked: list[dict[str, Any]] = []

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        assert (url, path) == ("http://p", CHAT)
        self.checked.append(json.loads(raw))
        if self.error is not None:
            raise self.error
        return Checked([tokens_of(self.checked[-1])], multimodal=False, encode_tokens=0)


def request(path: str, **body: Any) -> ClientRequest:
    own = {"model": MODEL, **body}
    raw = json.dumps(own).encode()
    return ClientRequest(
        path=path, raw=raw, size=len(raw), body=own, explicit_id=None,
        chain=chain_of(*heard(path, own)), one_off=False, final=False, request_id=None,
        hints=None,  # type: ignore[arg-type]
    )  # fmt: skip


def chat(*said: str, **more: Any) -> ClientRequest:
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": "user", "content": one} for one in said]
    return request(CHAT, messages=messages, **more)


def length(lengths: SystemLengths, asked: ClientRequest, shown: dict[str, Any]) -> int:
    prompt = tokens_of(shown)
    counted = CountedPrompt(prompt, len(prompt), len(prompt))
    return asyncio.run(lengths.length(asked, counted, "http://p"))


def counted_by(engine: Engine, asked: ClientRequest, **settings: Any) -> int:
    return length(SystemLengths(engine, **settings), asked, asked.body)  # type: ignore[arg-type]


WHOLE = len(f"[]<system>{SYSTEM}<user>")


def test_it_is_what_two_prompts_of_that_part_have_in_common() -> None:
    engine = Engine()
    lengths = SystemLengths(engine)  # type: ignore[arg-type]
    # Whatever the message behind it begins with.
    for text in ("a question", "7 questions", ".", ""):
        asked = chat(text)
        assert length(lengths, asked, asked.body) == WHOLE
    # It is counted once.
    assert len(engine.checked) == 2


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_of_another_api_it_is_the_chats(path: str) -> None:
    said = [{"role": "user", "content": "hi"}]
    body = {"system": SYSTEM, "messages": said}
    if path == RESPONSES:
        body = {"instructions": SYSTEM, "input": said}
    engine = Engine()
    lengths = SystemLengths(engine)  # type: ignore[arg-type]
    asked = request(path, **body)
    shown = chat("hi").body
    assert asked.chain == chat("hi").chain
    assert length(lengths, asked, shown) == WHOLE
    assert all(one["model"] == MODEL for one in engine.checked)


def test_tools_are_a_part_of_it() -> None:
    engine = Engine()
    with_tools = counted_by(engine, chat("hi", tools=[TOOL]))
    assert with_tools == WHOLE + len(json.dumps([TOOL])) - len("[]")


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"terse": True}},
        {"reasoning_effort": "high"},
        {"tool_choice": "none", "tools": [TOOL]},
    ],
)
def test_what_may_be_written_otherwise_is_not_counted(more: dict[str, Any]) -> None:
    engine = Engine()
    assert counted_by(engine, chat("hi", **more)) == 0
    assert counted_by(engine, chat("hi"), volatile=("times",)) == 0
    assert engine.checked == []


def test_no_system_part_and_a_short_one_are_not_counted() -> None:
    engine = Engine()
    assert counted_by(engine, request(CHAT, messages=[{"role": "user", "content": "hi"}])) == 0
    short = [{"role": "system", "content": "b"}, {"role": "user", "content": "hi"}]
    assert counted_by(engine, request(CHAT, messages=short)) == 0
    assert engine.checked == []


def test_a_refusal_is_kept_and_an_engine_that_is_gone_is_not() -> None:
    asked = chat("hi")
    for error, times in ((ApiError(400, "no"), 1), (EngineUnreachable("gone"), 2)):
        engine = Engine(error)
        lengths = SystemLengths(engine)  # type: ignore[arg-type]
        assert [length(lengths, asked, asked.body) for _ in range(2)] == [0, 0]
        # Each time with two texts, side by side.
        assert len(engine.checked) == 2 * times


def test_token_ids_are_counted_where_they_are() -> None:
    def counted(path: str = COMPLETIONS, **body: Any) -> CountedPrompt | None:
        return counted_as_sent(request(path, **body))

    assert counted(prompt=[5, 6, 7]) == CountedPrompt([5, 6, 7], 3, 3)
    # Of any other prompt an engine says how long it is, or what is wrong with it.
    for prompt in ("5 6 7", [], [[5, 6], [7]], [5, True], [5, "6"], None):
        assert counted(prompt=prompt) is None
    assert counted(prompt=[5, 6], truncate_prompt_tokens=1) is None
    assert counted(CHAT, prompt=[5, 6], messages=[]) is None
