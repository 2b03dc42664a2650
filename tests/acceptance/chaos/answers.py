"""Whether answers are those of an undisturbed run: of an engine on which nothing dies."""

import asyncio

import httpx

from tests.acceptance.chaos.client import body_of
from tests.acceptance.chaos.tally import Answered, Tally

_AT_A_TIME = 32
# Two tokens so close in log-probability are a tie: batches of other sizes add floats in another
# order, and either is the most likely one then.
_TIE = 1e-3


async def compare(tally: Tally, url: str) -> None:
    """Have a bare engine answer all turns again, and note those that differ.

    Args:
        url: the engine's.
    """
    gate = asyncio.Semaphore(_AT_A_TIME)
    async with httpx.AsyncClient(timeout=600) as client, asyncio.TaskGroup() as group:
        for answered in tally.answers:
            group.create_task(_compare(tally, client, url, gate, answered))


async def _compare(
    tally: Tally, client: httpx.AsyncClient, url: str, gate: asyncio.Semaphore, answered: Answered
) -> None:
    body = body_of(list(answered.messages), answered.output_tokens)
    async with gate:
        response = await client.post(
            url + "/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}
        )
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    right = choice["message"]["content"] or ""
    if right == answered.content:
        return
    said = ""
    for token in choice["logprobs"]["content"]:
        if not answered.content.startswith(said + token["token"]):
            first, second = token["top_logprobs"]
            if first["logprob"] - second["logprob"] < _TIE:
                tally.ties += 1
                return
            break
        said += token["token"]
    tally.wrong += 1
    tally.fail(f"{answered.key}: {answered.content!r} instead of {right!r}")
