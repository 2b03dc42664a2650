"""What is said of one response agrees, made by vLLM's own code from the tokens of an answer."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent

from conserve import wire
from conserve.apis import RESPONSES
from conserve.items import response_of
from conserve.recognition.apis import answers_of
from conserve.turn import TurnKey
from tests.unit.deployments import asgi
from tests.unit.deployments.engine.following import engine_turns
from tests.unit.deployments.engine.vllm_responses import CALL, RESPONSE_ID, Answered

Json = dict[str, Any]

HEX = RESPONSE_ID.removeprefix("resp_")

KEY = TurnKey("c", 1, 256)


@dataclass
class Told:
    """What a client is told of an answer, and what its decoder keeps.

    Attributes:
        sent: the body's parts, or the events.
        kept: the response that is kept.
        headers: the answer's.
    """

    sent: list[bytes]
    kept: Json
    headers: dict[str, str]

    @property
    def events(self) -> list[Json]:
        """The events' data; each event's name is its type."""
        found = []
        for event in self.sent:
            name, data = event.removesuffix(b"\n\n").split(b"\n")
            found.append(json.loads(data.removeprefix(b"data: ")))
            assert name.decode() == f"event: {found[-1]['type']}"
        return found

    def of(self, kind: str) -> list[Json]:
        """The events of a type."""
        return [event for event in self.events if event["type"] == f"response.{kind}"]


async def told(answered: Answered, stream: bool, **request: Any) -> Told:
    """What comes of an answer behind a decoder's keeper of responses."""
    parts = [*await answered.events(), b""] if stream else [await answered.body()]
    about = {"content-type": "text/event-stream" if stream else "application/json"}
    if not stream:
        about["content-length"] = str(len(parts[0]))

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await asgi.respond(send, *parts, headers=about)

    keeper = engine_turns(vllm)
    sent = await asked(keeper, **request)
    kept = await asgi.exchanged(keeper, b"", method="GET", path=wire.STORED_PREFIX + RESPONSE_ID)
    _, headers, _ = asgi.told(sent)
    response = json.loads(kept[1]["body"])["response"]
    return Told([one["body"] for one in sent[1:] if one["body"]], response, headers)


async def asked(app: Any, **request: Any) -> list[Json]:
    """Return what an application answers to a turn."""
    body = {"request_id": RESPONSE_ID, "input": "x", **request}
    headers = {wire.TURN_HEADER: wire.DecoderTurn(KEY).header()}
    return await asgi.exchanged(app, body, method="POST", path=RESPONSES, headers=headers)


def without_usage(event: Json) -> Json:
    """An event as OpenAI's types have it: its usage counts what is written to a cache."""
    return {**event, "response": {**event["response"], "usage": None}}


async def test_a_streamed_call_has_one_id_and_the_same_arguments_everywhere() -> None:
    whole = await told(Answered("I look. " + CALL), stream=True)
    message, call = (event["item"] for event in whole.of("output_item.done"))
    assert message["content"][0]["text"] == "I look. "
    assert message["id"] == f"msg_{HEX}_0"
    assert (call["id"], call["call_id"]) == (f"fc_{HEX}_1", f"call_{HEX}_1")
    # As the model has written them.
    assert call["arguments"] == '{"on":true,"at":[1,2]}'
    begun = [event["item"] for event in whole.of("output_item.added")]
    assert [item["id"] for item in begun] == [message["id"], call["id"]]
    assert begun[1]["call_id"] == call["call_id"]
    deltas = whole.of("function_call_arguments.delta")
    assert {event["item_id"] for event in deltas} == {call["id"]}
    assert "".join(event["delta"] for event in deltas) == call["arguments"]
    (done,) = whole.of("function_call_arguments.done")
    assert (done["item_id"], done["arguments"]) == (call["id"], call["arguments"])
    (last,) = whole.of("completed")
    assert last["response"]["output"] == whole.kept["output"] == [message, call]
    assert whole.kept == last["response"]
    assert [event["sequence_number"] for event in whole.events] == list(range(len(whole.events)))
    ResponseCompletedEvent.model_validate(without_usage(last), strict=True)
    assert {response_of(item["id"]) for item in (message, call)} == {RESPONSE_ID}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("hello wor", ["message"]),
        ("I look. " + CALL[:60], ["message", "function_call"]),
        (CALL[:60], ["function_call"]),
        # Of this one, nothing can be told yet.
        (CALL[:14], []),
    ],
)
async def test_a_stream_that_is_cut_by_length_says_so(text: str, kinds: list[str]) -> None:
    cut = await told(Answered(text, "length"), stream=True)
    assert cut.of("completed") == []
    (last,) = cut.of("incomplete")
    assert cut.events[-1] == last
    response = last["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert [item["type"] for item in response["output"]] == kinds
    done = [event["item"] for event in cut.of("output_item.done")]
    assert done == response["output"] == cut.kept["output"]
    # The last one was cut, and what came before it is whole.
    statuses = [*["completed"] * len(kinds), "incomplete"][-len(kinds) :] if kinds else []
    assert [item["status"] for item in done] == statuses
    assert "<tool_call>" not in json.dumps(response["output"])
    ResponseIncompleteEvent.model_validate(without_usage(last), strict=True)
    (answer,) = answers_of(RESPONSES, cut.sent, streamed=True)
    assert answer["role"] == "assistant"


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_an_answer_in_one_piece_says_the_same(reason: str) -> None:
    whole = await told(Answered("hello world", reason), stream=False)
    (body,) = whole.sent
    assert int(whole.headers["content-length"]) == len(body)
    response = json.loads(body)
    assert response == whole.kept
    status = {"stop": "completed", "length": "incomplete"}[reason]
    assert response["status"] == status
    (item,) = response["output"]
    assert (item["id"], item["status"]) == (f"msg_{HEX}_0", status)
    assert item["content"][0]["text"] == "hello world"
    Response.model_validate({**response, "usage": None}, strict=True)


async def test_log_probabilities_are_there_at_the_end() -> None:
    whole = await told(Answered("hello world", logprobs=True), stream=True)
    (last,) = whole.of("completed")
    (item,) = last["response"]["output"]
    said = "".join(one["token"] for one in item["content"][0]["logprobs"])
    assert said == "hello world"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [None, True])
async def test_a_response_has_the_fields_that_openai_requires(
    stream: bool, store: bool | None
) -> None:
    said: dict[str, Any] = {"safety_identifier": "me", "prompt_cache_key": "mine"}
    wanted = {"format": {"type": "text"}}
    if store is not None:
        wanted = {"format": {"type": "json_object"}}
        said |= {"store": store, "text": wanted}
    whole = await told(Answered("hello"), stream, **said)
    found = [event["response"] for event in whole.events if "response" in event] if stream else []
    for response in [*found, whole.kept]:
        assert response["store"] is True
        assert response["error"] is None
        assert response["text"] == wanted
        assert response["top_logprobs"] == 0
        assert (response["safety_identifier"], response["prompt_cache_key"]) == ("me", "mine")
    assert whole.kept["completed_at"] >= whole.kept["created_at"]
    assert all(response["completed_at"] is None for response in found[:-1])
    # Nor does anything say null where OpenAI has no null.
    (item,) = whole.kept["output"]
    assert None not in item.values()
    assert item["content"] == [
        {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    ]


async def test_what_is_no_response_is_passed_on() -> None:
    error = b'{"error": {"message": "no"}}'

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await asgi.respond(send, error, status=400)

    status, _, body = asgi.told(await asked(engine_turns(vllm)))
    assert (status, body) == (400, error)
