"""OpenAI's Responses API, by its official client, as Codex uses it."""

import json
import random
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from tests.engines.applications import MAIN
from tests.engines.client import BLOCK_TOKENS, chat, last_turn, lone_answer, prose, require_reuse
from tests.engines.stage import Stage
from tests.published_schemas import Published

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

MODEL = "conserve-embedded"
TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
    },
}
PUBLISHED = Published({"FunctionCallOutput": {"call_id"}}, texts={"name": "x"}, nulls=True)
# Of items that are served, what is refused: images, since the model reads text only.
UNFIT = ("InputImage", "InputFile", "encrypted_content", "call_id=null", "ItemReference")


@pytest.fixture
async def official(application: str) -> Any:
    async with openai.AsyncOpenAI(
        base_url=application + "/v1", api_key="unused", max_retries=0
    ) as official:
        yield official.responses


async def ask(official: Any, given: Any, **more: Any) -> Any:
    """A turn's response, and the headers that came with it."""
    asked = {"model": MODEL, "max_output_tokens": 24, "temperature": 0, "input": given, **more}
    raw = await official.with_raw_response.create(**asked)
    return raw.parse(), raw.headers


def items_of(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


async def test_a_conversation_without_a_name(
    official: Any, client: httpx.AsyncClient, stage: Stage, rng: random.Random
) -> None:
    """One handoff, then one decoder that has it all; in the middle it goes on as a chat."""
    stage.wait_for_lone()
    first_said = prose(rng, 700)
    items: list[Any] = [{"role": "user", "content": first_said}]
    messages: list[Any] = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": first_said},
    ]
    seen = []
    for turn in range(4):
        expected = await lone_answer(client, messages, 24)
        if turn == 2:
            reply = await chat(client, messages)
            answer, headers = reply.content, reply.headers
            items.append({"role": "assistant", "content": answer})
        else:
            response, headers = await ask(official, items, instructions="You are brief.")
            answer = response.output_text
            items += items_of(response)
            assert response.status in ("completed", "incomplete")
        assert answer == expected
        stats = await last_turn(client, headers["x-conversation-id"])
        seen.append((headers["x-conversation-id"], headers["x-conserve-decoder"], stats))
        messages += [{"role": "assistant", "content": answer}]
        for told in (items, messages):
            told.append({"role": "user", "content": f"go on {turn}"})
    require_reuse(seen)


async def test_a_stream(official: Any, rng: random.Random) -> None:
    """Its events are the Responses API's, and the next turn goes on from what they said."""
    items: list[Any] = [{"role": "user", "content": prose(rng, 300)}]
    whole, _ = await ask(official, items)
    stream, headers = await ask(official, items, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = events[-1].response
    assert events[-1].type == f"response.{done.status}"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == done.output_text == whole.output_text
    # As Codex does: by the items that came in the stream.
    told = [event.item.model_dump(exclude_none=True) for event in events
            if event.type == "response.output_item.done"]  # fmt: skip
    assert told == items_of(done)
    items += told
    items.append({"role": "user", "content": "go on"})
    _, again = await ask(official, items, store=False)
    assert again["x-conserve-decoder"]
    assert headers["x-conversation-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_by_length_says_so(
    official: Any, rng: random.Random, stream: bool
) -> None:
    """In its last event, in its items, in what is kept; and the conversation goes on."""
    asked = [{"role": "user", "content": prose(rng, 200)}]
    long: Any = {"max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    answer, headers = await ask(official, asked, stream=stream, **long)
    if stream:
        events = [event async for event in answer]
        assert events[-1].type == "response.incomplete"
        assert not [event for event in events if event.type == "response.completed"]
        (done,) = [event for event in events if event.type == "response.output_item.done"]
        assert done.item.status == "incomplete"
        answer = events[-1].response
        assert done.item == answer.output[0]
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]
    kept = await official.retrieve(answer.id)
    assert kept.status == "incomplete"
    assert kept.output == answer.output
    for given in ([*asked, *items_of(answer), {"role": "user", "content": "go on"}], "go on"):
        named = {"previous_response_id": answer.id} if given == "go on" else {}
        _, again = await ask(official, given, **named)
        assert again["x-conversation-id"] == headers["x-conversation-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_told(
    application: str, official: Any, client: httpx.AsyncClient, rng: random.Random, stream: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": prose(rng, 200)}]
    choice: Any = {"type": "function", "name": "look_up"}
    options: Any = {"tools": [TOOL], "max_output_tokens": 200}
    answer, headers = await ask(official, items, tool_choice=choice, stream=stream, **options)
    if stream:
        events = [event async for event in answer]
        answer = events[-1].response
        told = [event.item for event in events if event.type == "response.output_item.done"]
        assert told == answer.output
        begun = [event.item for event in events if event.type == "response.output_item.added"]
        assert [item.id for item in begun] == [item.id for item in told]
        assert begun[-1].call_id == told[-1].call_id
        deltas = [event for event in events if event.type.endswith("arguments.delta")]
        assert "".join(event.delta for event in deltas) == told[-1].arguments
        assert {event.item_id for event in deltas} == {told[-1].id}
    assert (await official.retrieve(answer.id)).output == answer.output
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "look_up"
    assert isinstance(json.loads(call.arguments)["on"], bool)
    shown = await client.get(f"{application}/v1/conversations/{headers['x-conversation-id']}")
    # A call is no answer yet to who waits for one.
    assert shown.json()["ttfet_s"] is None
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "it is on"}
    _, again = await ask(
        official, [*items, *items_of(answer), result], tool_choice="none", **options
    )
    assert again["x-conversation-id"] == headers["x-conversation-id"]
    assert again["x-conserve-decoder"] == headers["x-conserve-decoder"]
    # The same by the response's id: vLLM's own store would have lost the call.
    response, by_id = await ask(
        official, [result], tool_choice="none", previous_response_id=answer.id, **options
    )
    assert by_id["x-conversation-id"] == headers["x-conversation-id"]
    assert response.usage.input_tokens > 200


async def test_input_is_counted_as_the_engine_counts_it(official: Any) -> None:
    """With what comes before it, and the tools."""
    first, _ = await ask(official, "hello", instructions="You are brief.")
    for options in (
        {"input": "hello"},
        {"input": "hello", "instructions": "You are brief.", "tools": [TOOL]},
        {"input": "go on", "previous_response_id": first.id},
    ):
        counted = await official.input_tokens.count(model=MODEL, **options)
        turn, _ = await ask(official, options["input"], **{**options, "max_output_tokens": 1})
        assert counted.input_tokens == turn.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        await official.input_tokens.count(model=MODEL, input="x", previous_response_id="resp_x")


async def test_items_that_are_named_are_looked_up(
    application: str, official: Any, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """As the AI SDK does from the second turn on."""
    items: list[Any] = [{"role": "user", "content": prose(rng, 200)}]
    whole = [*items]
    seen = set()
    for turn in range(3):
        answer, headers = await ask(official, items)
        seen.add((headers["x-conversation-id"], headers["x-conserve-decoder"]))
        expected, _ = await ask(official, whole, store=False)
        assert answer.output_text == expected.output_text
        assert answer.usage.input_tokens == expected.usage.input_tokens
        items += [{"type": "item_reference", "id": item.id} for item in answer.output]
        whole += items_of(answer)
        for told in (items, whole):
            told.append({"role": "user", "content": f"go on {turn}"})
    assert len(seen) == 1
    await official.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match=answer.output[0].id) as told:
        await ask(official, items)
    assert told.value.code == "item_not_found"


async def test_what_the_published_schema_allows_is_served(
    application: str, client: httpx.AsyncClient
) -> None:
    kinds = ("message", "function_call", "function_call_output", "reasoning")
    served = [
        one.value
        for one in PUBLISHED.variants(ResponseInputItemParam)
        if one.value.get("type", "message") in kinds and not any(map(one.place.count, UNFIT))
    ]
    assert len(served) > 60
    body = {"input": [*served, {"role": "user", "content": "go on"}], "max_output_tokens": 1}
    reply = await client.post(application + "/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    every = dict.fromkeys(ResponseCreateParamsBase.__annotations__)
    reply = await client.post(
        application + "/v1/responses", json={**every, "stream": None, "input": "hello"}
    )
    assert reply.status_code == 200, reply.text


async def test_a_response_is_where_its_history_is(
    application: str, official: Any, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Retrieved, gone on from, forgotten; and cancelled, had it been in the background."""
    response, headers = await ask(official, prose(rng, 400))
    kept = await official.retrieve(response.id)
    assert kept.id == response.id
    assert kept.output_text == response.output_text
    for turn in range(2):
        stream, again = await ask(
            official, f"go on {turn}", previous_response_id=response.id, stream=True
        )
        response = [event async for event in stream][-1].response
        assert again["x-conversation-id"] == headers["x-conversation-id"]
        assert again["x-conserve-decoder"] == headers["x-conserve-decoder"]
        stats = await last_turn(client, again["x-conversation-id"])
        assert stats["decoder_cached_tokens"] >= 400 - BLOCK_TOKENS
        assert stats["lmcache_tokens"] == 0
    with pytest.raises(openai.BadRequestError, match="background"):
        await official.cancel(response.id)
    await official.delete(response.id)
    for act in (official.retrieve, official.delete, official.cancel):
        with pytest.raises(openai.NotFoundError) as told:
            await act(response.id)
        assert told.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as told:
        await ask(official, "go on", previous_response_id=response.id)
    assert told.value.code == "previous_response_not_found"
    unkept, _ = await ask(official, "hello", store=False)
    with pytest.raises(openai.NotFoundError):
        await official.retrieve(unkept.id)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "hello", "max_output_tokens": -1}, 400, None),
        ({"input": "hello", "previous_response_id": 7}, 400, "previous_response_id"),
        ({"input": "hello", "prompt": {"id": "x"}}, 400, "prompt"),
        ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, 404, "input[0]"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_openais_shape(
    application: str,
    client: httpx.AsyncClient,
    body: Any,
    status: int,
    param: str | None,
    stream: bool,
) -> None:
    reply = await client.post(application + "/v1/responses", json={**body, "stream": stream})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["message"]
    assert param is None or error["param"] == param
