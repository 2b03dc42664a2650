"""What recognition takes a request for is what vLLM makes of it."""

import random

from hypothesis import given, settings
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.canonical_items import canonical
from conserve.recognition.apis import messages_of, tools_of
from tests.unit.conserve.recognition.apis import told as apis
from tests.unit.conserve.recognition.digests import candidate_digests
from tests.unit.conserve.recognition.messages import SEEDS


@settings(deadline=None)
@given(SEEDS)
def test_messages_are_what_vllm_converts_them_to(seed: int) -> None:
    rng = random.Random(seed)
    body = apis.messages(apis.random_conversation(rng, 3), rng)
    asked = AnthropicMessagesRequest(model="m", max_tokens=1, **body)
    theirs = AnthropicServingMessages.to_chat_completion_request(asked)
    own = messages_of(MESSAGES, body)
    assert candidate_digests(own) == candidate_digests(theirs.messages)
    assert [message["role"] for message in own] == [one["role"] for one in theirs.messages]
    assert theirs.tools is not None
    shown = {"tools": [tool.model_dump() for tool in theirs.tools]}
    assert tools_of(MESSAGES, body) == tools_of(CHAT, shown)


@settings(deadline=None)
@given(SEEDS)
def test_items_are_what_vllm_converts_them_to(seed: int) -> None:
    rng = random.Random(seed)
    told = apis.random_conversation(rng, 3)
    for step in told.steps:
        step.image = False  # vLLM leaves them as they are until they are rendered.
    body = canonical(apis.responses(told, rng))
    asked = ResponsesRequest(model="m", **body)
    theirs = construct_input_messages(
        request_instructions=asked.instructions, request_input=asked.input
    )
    own = messages_of(RESPONSES, body)
    assert candidate_digests(own) == candidate_digests([dict(one) for one in theirs])
    assert [message["role"] for message in own] == [one["role"] for one in theirs]
    shown = {"tools": construct_tool_dicts(asked.tools, asked.tool_choice)}
    assert tools_of(RESPONSES, body) == tools_of(CHAT, shown)
