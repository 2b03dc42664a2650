"""What the published schemas of chats and Messages allow, sent to engines."""

import asyncio
from typing import Any

import httpx
import pytest

from conserve.apis import CHAT, MESSAGES
from tests.engines.applications import MAIN
from tests.published_schemas import Case, cases

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

_AT_A_TIME = 8


def is_for_engines(case: Case) -> bool:
    """Whether an engine has more to say to a request than that it is understood.

    Of what stands deeper in messages and tools, unit tests know; how long to cache is for nobody.
    """
    deep = case.where.startswith(("tools", "system")) or " message" in case.where
    return not (deep and "." in case.where.partition("]")[2]) and "cache" not in case.where


# The model that is served here reads text only, and a schema's variants hold no images.
_NO_IMAGE = ("reads text only", "no image that can be read", "data: URL", "base64", "http: or")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_what_a_schema_allows_is_served_or_refused_by_name(
    application: str, client: httpx.AsyncClient, path: str
) -> None:
    taking_part = asyncio.Semaphore(_AT_A_TIME)

    async def judged(case: Case) -> tuple[Case, int, Any]:
        async with taking_part:
            reply = await client.post(application + path, json=case.body)
        streamed = reply.headers["content-type"].startswith("text/event-stream")
        return case, reply.status_code, reply.text if streamed else reply.json()

    asked = [case for case in cases(path) if is_for_engines(case)]
    answers = await asyncio.gather(*map(judged, asked))
    wrong: list[Any] = []
    for case, status, body in answers:
        if status == 200:
            if isinstance(body, str) and '"error"' in body:
                wrong.append((str(case), body))
            continue
        message = body["error"]["message"]
        if status != 400 or not (case.names(message) or any(map(message.count, _NO_IMAGE))):
            wrong.append((str(case), status, message))
    assert wrong == []
    served = sum(status == 200 for _, status, _ in answers)
    # Of bodies with a budget of thinking, all are refused: it is over max_tokens.
    assert served > len(asked) / 3
