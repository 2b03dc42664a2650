"""``kill -9`` of routers under agents that send again: answers are whole, and computed once."""

import asyncio
import itertools
import json
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.engines.applications import WIDE
from tests.engines.client import engines, prose
from tests.engines.metrics import exposed, metric
from tests.engines.processes import at_port, kill
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(WIDE, last=True)]
logger = logging.getLogger(__name__)

AGENTS = 16
TOKENS = 200
FORMS = [*itertools.product(("chat", "responses", "messages"), ("text", "tool", "schema"))]
BROKEN = (openai.APIError, anthropic.APIError, httpx2.HTTPError)

# Its text, calls, reason to end, and tokens.
Answer = tuple[str, list[tuple[str, Any]], str | None, int]


class Sdks:
    """OpenAI's and Anthropic's own clients, with a connection for each request."""

    def __init__(self, url: str) -> None:
        told: dict[str, Any] = {"api_key": "unused", "default_headers": {"Connection": "close"}}
        self.openai: Any = openai.AsyncOpenAI(base_url=url + "/v1", **told)
        self.anthropic: Any = anthropic.AsyncAnthropic(base_url=url, **told)

    async def chat(
        self, said: Any, form: str, ends: bool, schema: Any, stream: bool, **told: Any
    ) -> Answer:
        asked = {"messages": said, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        if stream:
            asked["stream_options"] = {"include_usage": True}
        if form == "tool":
            function = {"name": "write", "parameters": schema}
            asked["tools"] = [{"type": "function", "function": function}]
            forced = {"type": "function", "function": {"name": "write"}}
            asked["tool_choice"] = forced if ends else "none"
        elif form == "schema" and ends:
            named = {"name": "r", "schema": schema}
            asked["response_format"] = {"type": "json_schema", "json_schema": named}
        found = await self.openai.chat.completions.create(**asked, **told)
        parts = [part async for part in found] if stream else [found]
        choices = [choice for part in parts for choice in part.choices]
        new = [choice.delta if stream else choice.message for choice in choices]
        calls = [call.function for one in new for call in one.tool_calls or ()]
        said = "".join(call.arguments or "" for call in calls)
        made = [(calls[0].name, json.loads(said))] if calls else []
        (end,) = [choice.finish_reason for choice in choices if choice.finish_reason]
        text = "".join(one.content or "" for one in new)
        assert len({part.id for part in parts}) == 1
        tokens = parts[-1].usage.completion_tokens
        return text, made, end, tokens

    async def responses(
        self, said: Any, form: str, ends: bool, schema: Any, stream: bool, **told: Any
    ) -> Answer:
        asked = {"input": said, "max_output_tokens": TOKENS, "temperature": 0, "stream": stream}
        if form == "tool":
            asked["tools"] = [{"type": "function", "name": "write", "parameters": schema}]
            asked["tool_choice"] = {"type": "function", "name": "write"} if ends else "none"
        elif form == "schema" and ends:
            asked["text"] = {"format": {"type": "json_schema", "name": "r", "schema": schema}}
        found = await self.openai.responses.create(**asked, **told)
        events = [event async for event in found] if stream else []
        found = events[-1].response if stream else found
        calls = [one for one in found.output if one.type == "function_call"]
        whole = "".join(call.arguments for call in calls) + found.output_text
        deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
        assert not stream or deltas == whole
        assert [event.sequence_number for event in events] == [*range(len(events))]
        made = [(call.name, json.loads(call.arguments)) for call in calls]
        return found.output_text, made, found.status, found.usage.output_tokens

    async def messages(
        self, said: Any, form: str, ends: bool, schema: Any, stream: bool, **told: Any
    ) -> Answer:
        asked = {"messages": said, "max_tokens": TOKENS}
        if form == "tool":
            asked["tools"] = [{"name": "write", "input_schema": schema}]
            asked["tool_choice"] = {"type": "tool", "name": "write"} if ends else {"type": "none"}
        elif form == "schema" and ends:
            asked["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        told["extra_body"]["temperature"] = 0
        asked |= told
        if stream:
            async with self.anthropic.messages.stream(**asked) as events:
                found = await events.get_final_message()
        else:
            found = await self.anthropic.messages.create(**asked)
        text = "".join(one.text for one in found.content if one.type == "text")
        calls = [(one.name, one.input) for one in found.content if one.type == "tool_use"]
        return text, calls, found.stop_reason, found.usage.output_tokens


@dataclass
class Crowd:
    """Agents that play their conversations again and again, and what has come of it."""

    sdks: Sdks
    stopped: bool = False
    expected: dict[int, list[Answer]] = field(default_factory=dict)
    answers: int = 0
    tokens: int = 0
    sent_again: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)

    async def play(self, number: int, round_: int) -> list[Answer]:
        """Have a conversation of three turns: text, text, and text, a call or an object."""
        rng = random.Random(number)
        api, form = FORMS[number % len(FORMS)]
        named = {"x-conversation-id": f"{number}-{round_}"} if number % 2 else {}
        told: dict[str, Any] = {"model": "conserve-embedded", "extra_headers": named}
        said: list[Any] = []
        answers = []
        for turn in range(3):
            said.append({"role": "user", "content": prose(rng, 40)})
            schema = {"type": "object", "properties": {"text": {"enum": [prose(rng, 100)]}},
                      "required": ["text"], "additionalProperties": False}  # fmt: skip
            # No two requests are the same, though their answers are.
            told["extra_body"] = {"metadata": {"round": str(round_)}}
            if api != "messages" and (turn < 2 or form == "text"):
                told["extra_body"]["ignore_eos"] = True
            stream = (number + turn) % 4 != 0
            answer = await self._until_answered(api, said, form, turn == 2, schema, stream, **told)
            said.append({"role": "assistant", "content": answer[0]})
            answers.append(answer)
        return answers

    async def _until_answered(self, api: str, *asked: Any, **told: Any) -> Answer:
        """Send again whatever breaks, as agents do where their SDKs do not."""
        while True:
            try:
                answer: Answer = await getattr(self.sdks, api)(*asked, **told)
                return answer
            except BROKEN as error:
                if 400 <= getattr(error, "status_code", 500) < 500:
                    raise
                self.sent_again[f"{type(error).__name__}: {str(error)[:60]}"] += 1
            await asyncio.sleep(random.choice((0, 0.3, 1)))

    async def go_on(self, number: int) -> None:
        for round_ in itertools.count(1):
            if self.stopped:
                return
            answers = await self.play(number, round_)
            for answer, expected in zip(answers, self.expected[number], strict=True):
                self.answers += 1
                self.tokens += answer[-1]
                if answer != expected:
                    self.wrong.append((number, round_, answer, expected))


def _generated() -> float:
    return sum(metric("vllm:generation_tokens_total", exposed(one["url"])) for one in engines())


@pytest.mark.parametrize("victims", ["routers", "routers and decoders"])
async def test_who_sends_again_has_the_whole_answer_once(
    application: str, stage: Stage, request: pytest.FixtureRequest, victims: str
) -> None:
    """Text, calls and objects; by each API, with a conversation's id or none."""
    kills = request.config.getoption("--router-kills")
    crowd = Crowd(Sdks(application))
    async with crowd.sdks.openai, crowd.sdks.anthropic:
        played = await asyncio.gather(*(crowd.play(number, 0) for number in range(AGENTS)))
        crowd.expected = dict(enumerate(played))
        before = _generated()
        agents = [asyncio.create_task(crowd.go_on(number)) for number in range(AGENTS)]
        for number in range(kills):
            await asyncio.sleep(random.uniform(0.5, 2.5))
            if "decoders" in victims and number % 4 == 1:
                await asyncio.to_thread(stage.wait_until_whole)
                kill(random.choice(engines("decoder"))["pid"])
                await asyncio.sleep(random.uniform(0, 2))
            await eventually("two routers listen", lambda: len(at_port(8000)) == 2, 120)
            kill(max(at_port(8000), key=at_port(8000, "ESTABLISHED").__getitem__))
            logger.info("%d kills, %d answers, %s", number + 1, crowd.answers, crowd.sent_again)
        crowd.stopped = True
        await asyncio.gather(*agents)
    await asyncio.to_thread(stage.wait_until_whole)
    generated = _generated() - before
    logger.info("%d answers, %d tokens, %d generated", crowd.answers, crowd.tokens, generated)
    assert not crowd.wrong, crowd.wrong[:3]
    if victims == "routers":
        # An answer whose end a router takes along is computed again; answers end together here.
        assert crowd.tokens <= generated <= crowd.tokens + TOKENS * kills
