"""What the published schemas of chats and Messages allow, on its way to an engine's prompt."""

import re
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from conserve.apis import CHAT, MESSAGES
from conserve.errors import ApiError
from deployments.upstream import message_prefill
from tests.published_schemas import WORD, Case, cases, fields
from tests.unit.deployments.engine.vllm_server import Server
from tests.unit.deployments.upstream.originals import unpatched

# Fields by which a request asks for what is not served.
REFUSED = {
    CHAT: {
        *("audio", "function_call", "functions", "modalities", "moderation"),
        "web_search_options",
    },
    MESSAGES: {"container"},
}
# Advice that has no effect on an answer.
WITHOUT_EFFECT = {
    CHAT: {
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity"),
    },
    MESSAGES: {
        *("cache_control", "diagnostics", "inference_geo", "service_tier", "speed"),
        *("user_profile_id", "workspace_id"),
    },
}
SERVED_KINDS = {
    CHAT: {"text", "refusal", "image_url", "input_audio", "function", "allowed_tools",
           "json_schema", "json_object"},
    MESSAGES: {"text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result",
               "tool_reference", "custom", "base64", "url", "any", "auto", "none", "tool"},
}  # fmt: skip
patched = unpatched(message_prefill.PATCH, then=True)

PROTOCOLS = {CHAT: ChatCompletionRequest, MESSAGES: AnthropicMessagesRequest}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_each_field_is_vllms_or_refused_or_has_no_effect(path: str) -> None:
    """A schema that has grown is looked at anew."""
    known = set(PROTOCOLS[path].model_fields)
    assert fields(path) - known - REFUSED[path] == WITHOUT_EFFECT[path]
    assert not REFUSED[path] & known


def found(body: Any, where: str) -> Any:
    """What stands at a place of a request; raises LookupError or TypeError if nothing does."""
    for step in re.findall(r"[^.\[\]]+", where):
        body = body[int(step) if step.isdigit() else step]
    return body


_MEDIA = ("image", "image_url", "input_image", "video_url", "audio_url")


def complaint(case: Case, error: ApiError) -> str | None:
    """What is wrong with a router's refusal; None: it names what is not served, where it stands."""
    where = error.param or ""
    if error.status != 400 or not where or where not in error.message:
        return f"it names no field: {error.message}"
    value, field = found(case.body, where), where.rpartition(".")[2]
    if isinstance(value, dict) and value.get("type") in _MEDIA:
        # What the schema's variants have for data is no image.
        return None
    if field != "type":
        return None if field in REFUSED[case.path] else f"{where} is served"
    misplaced = "in a message of the user's" in error.message
    if value in SERVED_KINDS[case.path] and not misplaced:
        return f"{value} is served"
    return None if value in error.message else f"it does not name {value}: {error.message}"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_a_schema_allows_is_served_or_refused_by_name(path: str) -> None:
    server = Server(answer=["on"])
    wrong: list[tuple[str, str]] = []
    served = 0
    for case in cases(path):
        server.prompts.clear()
        try:
            response = server.serve(path, case.body)
        except ApiError as error:
            if (what := complaint(case, error)) is not None:
                wrong.append((str(case), what))
            continue
        if response.status_code != 200:
            # The model reads text only.
            if not case.names(response.text) and "multimodal" not in response.text:
                wrong.append((str(case), response.text[:200]))
            continue
        served += 1
        # Reasoning is not for the next turn's prompt.
        if case.told and WORD not in server.prompt and "thinking" not in case.choice:
            wrong.append((str(case), "the model is not told of it"))
    assert wrong == []
    assert served > 100
