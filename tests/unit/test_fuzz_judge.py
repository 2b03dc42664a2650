"""What the fuzz test takes for wrong: it must not let pass what it is there to find."""

import json
from typing import Any

import pytest
import requests
import schemathesis
from schemathesis import Response
from schemathesis.core.failures import FailureGroup

from deployments.router import interface
from tests.engines.fuzz.trial import Wrong, judge

JSON, EVENTS = "application/json", "text/event-stream"
ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
CHAT = {
    "id": "a",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant"}}],
    "usage": {"prompt_tokens": 1, "total_tokens": 2},
}


def judged(status: int, body: Any, kind: str = JSON, *, cut: bool = False, **headers: str) -> None:
    """Judge an answer to a chat."""
    document = {
        "openapi": "3.1.0",
        "info": {"title": "a", "version": "1"},
        "paths": {"/v1/chat/completions": interface.PATHS["/v1/chat/completions"]},
        "components": interface.COMPONENTS,
    }
    operation = schemathesis.openapi.from_dict(document)["/v1/chat/completions"]["POST"]
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    asked = requests.Request("POST", "http://localhost/v1/chat/completions").prepare()
    given = {name.replace("_", "-"): [value] for name, value in headers.items()}
    response = Response(
        status,
        {"content-type": [kind], **given},
        content,
        asked,
        0.1,
        False,
        stream_cut_short=cut,
    )
    judge(operation.Case(), response)


SERVED = {"x_conversation_id": "a", "x_conserve_decoder": "b"}


def test_what_is_right_passes() -> None:
    judged(200, CHAT, **SERVED)
    judged(400, ERROR)
    judged(403, ERROR)
    judged(503, ERROR, retry_after="5")
    judged(200, 'data: {"a": 1}\n\ndata: [DONE]\n\n', EVENTS, **SERVED)
    judged(200, 'data: {"a": 1}\n\n', EVENTS, cut=True, **SERVED)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (500, ERROR, JSON),
        (503, ERROR, JSON),  # It does not say when to come back.
        (400, {"detail": "no"}, JSON),
        (400, "no", JSON),
        (200, 'data: {"a": 1}\n\n', EVENTS),
        (200, "data: {\n\ndata: [DONE]\n\n", EVENTS),
        (200, 'data: {"error": {"type": "server_error"}}\n\ndata: [DONE]\n\n', EVENTS),
    ],
)
def test_what_may_not_be_is_wrong(status: int, body: Any, kind: str) -> None:
    with pytest.raises(Wrong):
        judged(status, body, kind, **SERVED)


def test_what_is_not_declared_fails() -> None:
    with pytest.raises(FailureGroup):
        judged(418, ERROR)
    with pytest.raises(FailureGroup):
        judged(200, {**CHAT, "choices": 7}, **SERVED)
    with pytest.raises(FailureGroup):
        judged(200, CHAT)
    with pytest.raises(FailureGroup):
        judged(200, "no", "text/plain", **SERVED)
