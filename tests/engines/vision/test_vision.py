"""Prompts with images: their KV is handed off whole, and is never another image's."""

import asyncio
import os
import random
import signal
from typing import Any

import httpx
import pytest
from PIL import Image

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.wire import BEAT_S, PREFILL_PREFIX
from tests.engines.applications import VISION
from tests.engines.client import TIMEOUT_S, Agent, engines, last_turn, lone_answer, prose
from tests.engines.lone import LONE_PORT
from tests.engines.metrics import metric
from tests.engines.processes import kill
from tests.engines.stage import Stage
from tests.engines.vision.failing import GREEN
from tests.engines.vision.turns import OUTPUT_TOKENS, ask, asking, parts_of, png
from tests.engines.vision.turns import answer_of as _answered
from tests.engines.vision.turns import body_of as _body
from tests.engines.vision.turns import encoded as _encoded
from tests.engines.vision.turns import new_image as _image
from tests.engines.vision.turns import said as _said
from tests.engines.vision.turns import user as _user

pytestmark = [pytest.mark.anyio, pytest.mark.application(VISION)]

BLOCK_TOKENS = 128
LONE = f"http://127.0.0.1:{LONE_PORT}"
# Of a prompt's text before its image so much is a whole chunk.
BEFORE = BLOCK_TOKENS


def _whole(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _texts(rng: random.Random) -> tuple[str, str]:
    """They begin in a whole chunk, go on into the next, and end some chunks behind the image."""
    return prose(rng, BEFORE + 20), prose(rng, 300)


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> httpx.Response:
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_image_is_handed_off_with_its_prompt(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random,
    path: str, stream: bool,
) -> None:  # fmt: skip
    stage.wait_for_lone()
    body = _body(path, _texts(rng), _image(rng))
    headers, answer, _ = await ask(client, application, path, body, stream=stream)
    stats = await last_turn(client, headers["x-conversation-id"])
    assert stats["prompt_tokens"] > 4 * BLOCK_TOKENS
    assert stats["lmcache_tokens"] == _whole(stats["prompt_tokens"] - 1)
    assert stats["decoder_cached_tokens"] == 0
    _, alone, _ = await ask(client, LONE, path, body, stream=stream)
    assert answer == alone != ""


async def test_later_turns_find_the_image_where_they_are(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    agent, image, before = Agent(client), _image(rng), _encoded()[0]
    for turn in range(3):
        # It comes again with the last.
        said = prose(rng, 80) if turn == 1 else _said(_texts(rng), image)
        await agent.say(said, tokens=OUTPUT_TOKENS, stream=turn != 1)
    assert _encoded()[0] == before + 1
    first, *later = agent.stats
    assert first["lmcache_tokens"] == _whole(first["prompt_tokens"] - 1)
    held = first["prompt_tokens"] + first["output_tokens"]
    for stats in later:
        assert stats["lmcache_tokens"] == 0
        assert stats["decoder_cached_tokens"] == _whole(held - 1)
        held = stats["prompt_tokens"] + stats["output_tokens"]
    for turn in range(3):
        asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
        assert await lone_answer(client, asked, OUTPUT_TOKENS) == answer["content"]


def _conversation(path: str, first: list[Any], later: list[Any]) -> list[list[dict[str, Any]]]:
    """Messages of two turns: images in a message, and in a tool's result."""
    call = {"id": "call_1", "name": "look", "arguments": "{}"}
    if path == CHAT:
        calls = [{"id": call["id"], "type": "function", "function": call}]
        told = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": later},
        ]
    elif path == MESSAGES:
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        told = [
            {"role": "assistant", "content": [use]},
            _user([{"type": "tool_result", "tool_use_id": "call_1", "content": later}]),
        ]
    else:
        told = [
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": later},
        ]
    return [[_user(first)], [_user(first), *told]]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_each_image_is_encoded_once_on_its_node_by_every_api(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, path: str
) -> None:
    """One image twice, one again in a tool's result; each prompt ends in an image."""
    stage.wait_for_lone()
    one, two, three = (_image(rng) for _ in range(3))
    shown = [("text", prose(rng, 150)), ("image", one), ("text", "and"), ("image", two)]
    first = parts_of(path, *shown, ("image", one))
    later = parts_of(path, ("image", two), ("text", "then"), ("image", three))
    for number, messages in enumerate(_conversation(path, first, later)):
        before, body = _encoded()[0], asking(path, messages)
        reply = await _post(client, application + path, body)
        alone = await _post(client, LONE + path, body)
        assert _answered(path, reply.json()) == _answered(path, alone.json())
        # Of the second turn, only the third image is new.
        assert _encoded()[0] - before == (2, 1)[number]
        stats = await last_turn(client, reply.headers["x-conversation-id"])
        assert stats["encoded_images"] == (2, 1)[number]
        # The encoder had them. So the first turn's prefiller has found both, and its decoder one,
        # since the prompt ends within an image. The second turn's decoder has found the new one,
        # and one that was in a chunk that was handed off.
        assert stats["node_images"] == (3, 2)[number]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_goes_on_by_a_responses_id_from_what_it_was_shown(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, stream: bool
) -> None:
    """Each turn brings an image, the second in a tool's result, and the last the first again."""
    stage.wait_for_lone()
    # So large that they are kept out of the way while their bodies are parsed.
    one, two = _image(rng, 400), _image(rng, 400)
    first, later = (
        parts_of(RESPONSES, ("text", prose(rng, 150)), ("image", image)) for image in (one, two)
    )
    begun, told = _conversation(RESPONSES, first, later)
    turns = [begun, told[1:], [_user(parts_of(RESPONSES, ("image", one)))]]
    before, history, previous = _encoded()[0], [], None
    for said in turns:
        history += said
        body = {**asking(RESPONSES, said), "previous_response_id": previous}
        _, answer, end = await ask(client, application, RESPONSES, body, stream=stream)
        _, alone, _ = await ask(client, LONE, RESPONSES, asking(RESPONSES, history), stream=stream)
        assert answer == alone != ""
        response = end["response"] if stream else end
        previous, history = response["id"], [*history, *response["output"]]
    assert _encoded()[0] == before + 2


async def test_of_another_image_nothing_is_taken(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """The same text around it: the same token ids, and the same length."""
    stage.wait_for_lone()
    texts, images = _texts(rng), [_image(rng) for _ in range(2)]
    found, answers = [], []
    for image in (*images, images[0]):
        body = _body(CHAT, texts, image)
        reply = (await _post(client, application + CHAT, body)).json()
        found.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        answers.append(_answered(CHAT, reply))
        alone = await _post(client, LONE + CHAT, body)
        assert answers[-1] == _answered(CHAT, alone.json())
    whole = _whole(reply["usage"]["prompt_tokens"] - 1)
    assert found == [0, BEFORE, whole]
    assert answers[0] == answers[2] != answers[1]


async def test_lmcache_tells_images_apart(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Without the engines' own caches: what one has stored, another one looks up."""
    texts, one, other = _texts(rng), _image(rng), _image(rng)
    (prefiller,), (decoder, _) = engines("prefiller"), engines("decoder")
    prefill = prefiller["url"] + PREFILL_PREFIX + CHAT
    done = (await _post(client, prefill, _body(CHAT, texts, one))).json()
    whole = _whole(done["prefilled_tokens"] - 1)
    assert (done.get("prefiller_lmcache_tokens"), done["prefiller_cached_tokens"]) == (None, 0)
    # It came to the prefiller straight, past the encoder.
    assert done["encoded_images"] == 1
    for image, found in ((other, BEFORE), (one, whole)):
        reply = await _post(client, decoder["url"] + CHAT, _body(CHAT, texts, image))
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == found


async def test_an_encoder_loads_no_language_model_and_computes_no_prompt(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    (encoder,) = engines("encoder")
    assert (encoder["hosts"], encoder["capacity_tokens"]) == (False, 0)
    encoded, found = _encoded()
    await _post(client, application + CHAT, _body(CHAT, _texts(rng), _image(rng)))
    assert _encoded() == (encoded + 1, found + 1)
    exposed = (await client.get(encoder["url"] + "/metrics")).text
    assert metric("vllm:request_success_total", exposed) > 0
    assert metric("vllm:generation_tokens_total", exposed) == 0
    health = (await client.get(application + "/health")).json()
    assert health == {"status": "ok", "prefillers": 1, "decoders": 2, "encoders": 1}


@pytest.mark.application(VISION, last=True)
async def test_a_turn_outlives_an_encoder_that_is_killed_with_its_image(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    (encoder,) = engines("encoder")
    body = _body(CHAT, _texts(rng), _image(rng))
    encoded, found = _encoded()
    # It has the image, and does nothing.
    os.kill(encoder["pid"], signal.SIGSTOP)
    asked = asyncio.ensure_future(_post(client, application + CHAT, body))
    await asyncio.sleep(1)
    assert not asked.done()
    kill(encoder["pid"])
    reply = await asked
    alone = await _post(client, LONE + CHAT, body)
    assert _answered(CHAT, reply.json()) == _answered(CHAT, alone.json())
    # The prefiller has encoded it, as the next one's does.
    assert _encoded() == (encoded + 1, found)
    await _post(client, application + CHAT, _body(CHAT, _texts(rng), _image(rng)))
    assert _encoded() == (encoded + 2, found)
    assert metric("conserve_engines_lost_total", role="encoder") == 1
    stage.wait_until_whole()
    (successor,) = engines("encoder")
    assert successor["id"] != encoder["id"]

    # The router hears of it with its next beat.
    for _ in range(30):
        await asyncio.sleep(BEAT_S)
        await _post(client, application + CHAT, _body(CHAT, _texts(rng), _image(rng)))
        if _encoded()[1] > found:
            break
    else:
        raise AssertionError("nothing goes by the successor")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_encoder_that_fails_ends_its_turn_and_not_the_engine(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, stream: bool
) -> None:
    stage.wait_for_lone()
    before = {engine["id"] for engine in engines()}
    body = _body(CHAT, _texts(rng), png(Image.new("RGB", (112, 112), GREEN))) | {"stream": stream}
    other = Agent(client, messages=[_user(_said(_texts(rng), _image(rng)))])
    answering = asyncio.ensure_future(other.ask(tokens=200, stream=True))
    # Nothing that was computed for the first is found for the second.
    for _ in range(2):
        reply = await client.post(application + CHAT, json=body)
        assert reply.status_code == 422, reply.text
        assert "could not be encoded" in reply.text
    told = await answering
    assert told.content == await lone_answer(client, other.messages, 200)
    assert {engine["id"] for engine in engines()} == before


@pytest.mark.application(VISION, last=True)
async def test_a_stream_goes_on_at_another_decoder_with_its_image(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    agent = Agent(client, "seen", [_user(_said(_texts(rng), _image(rng)))])
    began, story_tokens = asyncio.Event(), 400
    encoded, _ = _encoded()
    telling = asyncio.ensure_future(agent.ask(tokens=story_tokens, stream=True, began=began))
    await asyncio.wait_for(began.wait(), TIMEOUT_S)
    await asyncio.sleep(0.3)
    bound = (await client.get(f"{application}/v1/conversations/seen")).json()["decoder"]
    kill(next(engine["pid"] for engine in engines("decoder") if engine["id"] == bound))
    told = await telling
    assert metric("conserve_stream_moves_total") == 1
    # The engine that took over found what the first one had encoded.
    assert _encoded()[0] == encoded + 1
    assert told.content == await lone_answer(client, agent.messages, story_tokens)
    # What the stream had put out is computed there; the prompt is not.
    assert (await last_turn(client, "seen"))["lmcache_tokens"] >= 4 * BLOCK_TOKENS
