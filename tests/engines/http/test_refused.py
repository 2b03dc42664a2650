"""What the engine would refuse is refused before anything is computed, and nothing is counted."""

import json
import random
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.engines.applications import MAIN
from tests.engines.client import engines, prose
from tests.engines.metrics import exposed, metric

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

CHAT = {"messages": [{"role": "user", "content": "hello " * 300}]}
COMPLETION = {"prompt": "hello " * 300}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

BOTH: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "no tokens": {"max_tokens": 0},
    "tokens over the context": {"max_tokens": 1_000_000},
    "no choice": {"n": 0},
    "min_tokens": {"min_tokens": 9, "max_tokens": 8},
    "a format of no kind": {"response_format": {"type": "poem"}},
    "a grammar that is none": {"structured_outputs": {"regex": "("}},
    "a grammar that is none, streamed": {"structured_outputs": {"regex": "("}, "stream": True},
    "two grammars": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "bias of no token": {"logit_bias": {"99999999": 1}},
    "bias of no token, streamed": {"logit_bias": {"99999999": 1}, "stream": True},
    "token ids": {"allowed_token_ids": [99_999_999]},
    "seed": {"seed": 2**80},
    "priority": {"priority": "high"},
}
CHATS: dict[str, dict[str, Any]] = {
    "too many log-probabilities": {"logprobs": True, "top_logprobs": 500},
    "the same, streamed": {"logprobs": True, "top_logprobs": 500, "stream": True},
    "a tool that must be called, of none": {"tool_choice": "required"},
    "a tool that is not there": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "a choice of no kind": {"tools": [TOOL], "tool_choice": "perhaps"},
    "a schema that is none": {"response_format": {"type": "json_schema"}},
    "a template of the client's own": {"chat_template": "{{ messages }}"},
    "a part of no kind": {
        "messages": [{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}]
    },
    "a prompt over the context": {"messages": [{"role": "user", "content": "hello " * 20_000}]},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "too many log-probabilities": {"logprobs": 500},
    "the same, streamed": {"logprobs": 500, "stream": True},
    "suffix": {"suffix": "the end"},
    "a token of none": {"prompt": [1, 2, 99_999_999]},
    "a negative token": {"prompt": [1, -2]},
    "embeddings": {"prompt_embeds": "AAAA"},
    "the second prompt": {"prompt": ["fine", [1, 99_999_999]]},
    "a beam search, streamed": {"use_beam_search": True, "stream": True},
}
# Prompts of token ids that stay at home are judged by their decoders alone: of each kind some.
JUDGED_BY_DECODERS = (
    "temperature",
    "tokens over the context",
    "a grammar that is none",
    "a grammar that is none, streamed",
    "bias of no token",
    "bias of no token, streamed",
)


def computed() -> tuple[float, ...]:
    """What a prefill would change."""
    prompts = [metric("vllm:prompt_tokens_total", exposed(one["url"])) for one in engines()]
    return (metric("conserve_cold_prefills_total"), metric("conserve_conversations"), *prompts)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(pytest.param("chat/completions", {**CHAT, **b}, id=n) for n, b in (BOTH | CHATS).items()),
        *(
            pytest.param("completions", {**COMPLETION, **b}, id=f"completion: {n}")
            for n, b in (BOTH | COMPLETIONS).items()
        ),
        *(
            pytest.param("completions", {"prompt": [5] * 300, **BOTH[n]}, id=f"token ids: {n}")
            for n in JUDGED_BY_DECODERS
        ),
    ],
)
async def test_bad_parameters_cost_no_prefill(
    application: str, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    before = computed()
    reply = await client.post(f"{application}/v1/{path}", json={"max_tokens": 2, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert computed() == before


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        {"n": 3, "temperature": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"prompt_logprobs": 1, "stream": False},
        {"use_beam_search": True, "n": 2, "stream": False},
        {"echo": True},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_good_parameters_pass(
    application: str, client: httpx.AsyncClient, body: dict[str, Any], stream: bool
) -> None:
    """The check goes the whole way that an answer takes, whatever the answer consists of."""
    asked = {**CHAT, "max_tokens": 3, "stream": stream, **body}
    reply = await client.post(application + "/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    assert '"error"' not in reply.text


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["hello " * 300, "bye"]},
        {"prompt": [[5] * 300, [6]]},
        {"prompt": [5] * 300},
        {"prompt": "hello", "echo": True, "logprobs": 1},
        {"prompt": "hello", "n": 2, "use_beam_search": True},
    ],
)
async def test_good_completions_pass(
    application: str, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    reply = await client.post(application + "/v1/completions", json={"max_tokens": 2, **body})
    assert reply.status_code == 200, reply.text


async def test_the_prefiller_computes_the_prompt_of_the_turn(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """With what changes a prompt beside its messages: the decoder finds all whole chunks."""
    body = {
        "messages": [{"role": "user", "content": prose(rng, 300)}],
        "max_tokens": 2,
        "tools": [TOOL],
        "documents": [{"title": "one", "text": "two"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
    }
    reply = await client.post(application + "/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    shown = await client.get(f"{application}/v1/conversations/{reply.headers['x-conversation-id']}")
    last = shown.json()["last_turn"]
    assert last["prompt_tokens"] > 300
    assert last["lmcache_tokens"] == last["prompt_tokens"] // 128 * 128


# --- Values at the edges --------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"top_p": 0, "temperature": 1}, {"n": 2, "tools": []}])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
async def test_the_likeliest_tokens_can_be_asked_for_in_other_words(
    application: str, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    url = f"{application}/v1/{path}"
    asked = {**PROMPTS[f"/v1/{path}"]("hello there"), CAPS[f"/v1/{path}"]: 8, "temperature": 0}
    plain, other = [await client.post(url, json=each) for each in (asked, {**asked, **body})]
    assert other.status_code == 200, other.text
    for choice in other.json().get("choices", [{}]):
        one = {**other.json(), "choices": [choice]}
        assert text_of(f"/v1/{path}", one) == text_of(f"/v1/{path}", plain.json())


async def test_no_output_is_for_a_prompts_probabilities_and_for_the_cache(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    asked = {"prompt": "hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = await client.post(application + "/v1/completions", json=asked)
    (choice,) = reply.json()["choices"]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert (choice["text"], first) == ("hello there", None)
    assert all(-100 < one <= 0 for one in others)
    url, body = application + "/v1/messages", PROMPTS["/v1/messages"](prose(rng, 600))
    none, some = [(await client.post(url, json={**body, "max_tokens": n})).json() for n in (0, 4)]
    assert (none["content"], none["stop_reason"]) == ([], "max_tokens")
    assert none["usage"]["output_tokens"] == 0
    assert some["usage"]["cache_read_input_tokens"] >= 256


# --- What does not fit ---------------------------------------------------------------------------

MODEL = "conserve-embedded"
CONTEXT = 16_384
PROMPTS: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
}
CAPS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


async def tokens_of(client: httpx.AsyncClient, application: str, path: str, text: str) -> int:
    """How many tokens a first prompt has, by those who count it for clients."""
    asked = {"prompt": text} if path == "/v1/completions" else PROMPTS["/v1/messages"](text)
    to = "/tokenize" if path == "/v1/completions" else "/v1/messages/count_tokens"
    counted = (await client.post(application + to, json=asked)).json()
    return int(counted["count"] if to == "/tokenize" else counted["input_tokens"])


@pytest.mark.parametrize(("stream", "cap"), [(False, 8), (True, 32_000)])
@pytest.mark.parametrize("path", PROMPTS)
async def test_a_prompt_that_is_too_long_is_told_with_its_length(
    application: str,
    client: httpx.AsyncClient,
    rng: random.Random,
    path: str,
    stream: bool,
    cap: int,
) -> None:
    """Whatever output it asks for."""
    long = prose(rng, 20_000)
    tokens = await tokens_of(client, application, path, long)
    assert tokens > 19_000
    body = {**PROMPTS[path](long), CAPS[path]: cap, "stream": stream}
    reply = await client.post(application + path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert error["message"] == f"prompt is too long: {tokens} tokens > {CONTEXT} maximum"
        return
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(PROMPTS[path]("")))
    assert f"maximum context length is {CONTEXT} tokens." in error["message"]
    assert f"resulted in {tokens} tokens." in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PROMPTS)
async def test_an_output_that_is_too_long_is_no_prompt_that_is(
    application: str, client: httpx.AsyncClient, rng: random.Random, path: str, stream: bool
) -> None:
    text = prose(rng, 9000)
    tokens = await tokens_of(client, application, path, text)
    for prompt, length, cap in ((text, tokens, 9000), ("hello", None, 32_000)):
        body = {**PROMPTS[path](prompt), CAPS[path]: cap, "stream": stream}
        reply = await client.post(application + path, json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        if path != "/v1/messages":
            assert (error["param"], error["code"]) == (CAPS[path], "invalid_value")
            assert "context" not in error["message"]
            if length is not None:
                assert f"at most {CONTEXT - length} " in error["message"]
        elif length is not None:
            assert error["message"] == (
                f"input length and `max_tokens` exceed context limit: {length} + {cap} > "
                f"{CONTEXT}, decrease input length or `max_tokens` and try again"
            )
        else:
            assert error["message"].startswith(f"max_tokens: {cap} > {CONTEXT}, ")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_later_turn_is_told_the_same_and_its_conversation_goes_on(
    application: str, client: httpx.AsyncClient, rng: random.Random, stream: bool
) -> None:
    """Its decoder says it: nobody checks such a turn before."""
    url = application + "/v1/messages"
    said = [{"role": "user", "content": prose(rng, 400)}]
    first = await client.post(url, json={"messages": said, "max_tokens": 4})
    assert first.status_code == 200, first.text
    said.append({"role": "assistant", "content": first.json()["content"][0]["text"]})
    later = [*said, {"role": "user", "content": "and now?"}]
    counted = await client.post(url + "/count_tokens", json={"messages": later})
    tokens = counted.json()["input_tokens"]
    for body, message in (
        (
            {"messages": later, "max_tokens": CONTEXT},
            f"input length and `max_tokens` exceed context limit: {tokens} + {CONTEXT} > ",
        ),
        ({"messages": later, "max_tokens": 32_000}, f"max_tokens: 32000 > {CONTEXT}, "),
        (
            {"messages": [*said, {"role": "user", "content": "a " * 20_000}], "max_tokens": 4},
            "prompt is too long: 2",
        ),
    ):
        reply = await client.post(url, json={**body, "stream": stream})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"].startswith(message)
    reply = await client.post(url, json={"messages": later, "max_tokens": 4})
    assert reply.status_code == 200, reply.text
    for name in ("x-conversation-id", "x-conserve-decoder"):
        assert reply.headers[name] == first.headers[name]


async def test_claude_codes_default_gets_what_room_there_is(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """It asks any model for 32,000 tokens; on a first turn and on a later one."""
    said = [{"role": "user", "content": prose(rng, 400)}]
    headers = {"User-Agent": "claude-cli/2.1.105 (external, cli)"}
    places = []
    for _ in range(2):
        body = {"messages": said, "max_tokens": 32_000, "stop_sequences": ["e"], "stream": True}
        reply = await client.post(application + "/v1/messages", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert "event: message_stop" in reply.text
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line[:6] == "data: "]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        answer = "".join(delta["text"] for delta in deltas if "text" in delta)
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
        places.append(reply.headers["x-conserve-decoder"])
        refused = await client.post(application + "/v1/messages", json=body)
        assert refused.status_code == 400
    assert places[0] == places[1]


async def test_models_say_how_much_they_take(application: str) -> None:
    async with openai.AsyncOpenAI(base_url=application + "/v1", api_key="unused") as official:
        listed = [model async for model in official.models.list()]
        for model in (*listed, await official.models.retrieve(MODEL)):
            assert (model.model_extra or {})["max_model_len"] == CONTEXT
    async with anthropic.AsyncAnthropic(base_url=application, api_key="unused") as other:
        cards = [card async for card in other.models.list()]
        for card in (*cards, await other.models.retrieve(MODEL)):
            assert (card.max_input_tokens, card.max_tokens) == (CONTEXT, CONTEXT)


# --- Half a character ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROMPTS)
async def test_half_a_surrogate_pair_is_served_as_the_replacement_character(
    application: str, client: httpx.AsyncClient, rng: random.Random, path: str
) -> None:
    """As long as it stays in a history, and wherever else it stands."""
    url, cap = application + path, {CAPS[path]: 8, "temperature": 0}
    cut = f"{prose(rng, 300)} \ud83d"
    replies = []
    for text in (cut, cut.replace("\ud83d", "\ufffd")):
        # The client's own JSON cannot write it.
        body = {**PROMPTS[path](text), **cap, "user": text[-1]}
        headers = {"Content-Type": "application/json", "X-Conversation-Id": f"half {rng.random()}"}
        replies.append(await client.post(url, content=json.dumps(body), headers=headers))
        assert replies[-1].status_code == 200, replies[-1].text
    if path == "/v1/completions":
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        return
    name = replies[0].headers["x-conversation-id"]
    field = next(iter(PROMPTS[path]("")))
    answer = {"role": "assistant", "content": text_of(path, replies[0].json())}
    assert answer["content"] == text_of(path, replies[1].json())
    later = [{"role": "user", "content": cut}, answer, {"role": "user", "content": "\ude00 more"}]
    headers = {"Content-Type": "application/json", "X-Conversation-Id": name}
    reply = await client.post(url, content=json.dumps({field: later, **cap}), headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-conserve-decoder"] == replies[0].headers["x-conserve-decoder"]
    shown = (await client.get(f"{application}/v1/conversations/{name}")).json()
    assert (shown["turns"], shown["histories_total"]) == (2, 1)


def text_of(path: str, answer: Any) -> str:
    """What an answer says."""
    if path == "/v1/messages":
        return str(answer["content"][0]["text"])
    if path == "/v1/responses":
        return str(answer["output"][-1]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
