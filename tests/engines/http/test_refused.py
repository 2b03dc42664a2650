"""What the engine would refuse is refused before anything is computed, and nothing is counted."""

import random
from typing import Any

import httpx
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
    "stream options without a stream": {"stream_options": {"include_usage": True}},
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
            pytest.param("completions", {"prompt": [5] * 300, **b}, id=f"token ids: {n}")
            for n, b in BOTH.items()
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_grammar_that_only_its_compiler_refuses(
    application: str, client: httpx.AsyncClient, path: str
) -> None:
    """vLLM finds that out once it has the request, and says that it has failed itself."""
    body = {**CHAT, **COMPLETION, "structured_outputs": {"grammar": "root ::= root"}}
    response = await client.post(application + path, json={**body, "max_tokens": 8})
    assert response.status_code == 400, response.text
    assert "grammar" in response.json()["error"]["message"]
