"""What the published schemas of chats and Messages allow, on its way to an engine's prompt."""

import re
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from conserve.apis import CHAT, MESSAGES
from conserve.errors import ApiError
from tests.published_schemas import WORD, cases, fields
from tests.unit.deployments.engine.vllm_server import Server

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
        *("cache_control", "diagnostics", "inference_geo", "service_tier", "speed", "thinking"),
        *("user_profile_id", "workspace_id"),
    },
}
SERVED_KINDS = {
    CHAT: {"text", "refusal", "image_url", "input_audio", "function", "allowed_tools",
           "json_schema", "json_object"},
    MESSAGES: {"text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result",
               "tool_reference", "custom", "base64", "url", "any", "auto", "none", "tool"},
}  # fmt: skip
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


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_a_schema_allows_is_served_or_refused_by_name(path: str) -> None:
    server = Server(answer=["on"])
    wrong, served = [], 0
    for case in cases(path):
        server.prompts.clear()
        try:
            response = server.serve(path, case.body)
        except ApiError as error:
            # By the place in the request, as it was sent, and for what is not served alone.
            assert error.status == 400, str(case)
            assert error.param is not None, str(case)
            assert error.param in error.message, str(case)
            kind = found(case.body, error.param)
            if error.param.endswith(".type"):
                if kind in SERVED_KINDS[path] and "in a message of the user's" not in error.message:
                    wrong.append((str(case), error.message))
                assert kind in error.message, str(case)
            elif error.param.rpartition(".")[2] not in REFUSED[path]:
                wrong.append((str(case), error.message))
            continue
        if response.status_code != 200:
            if not case.names(response.text) and "multimodal" not in response.text:
                wrong.append((str(case), response.text[:200]))
            continue
        served += 1
        # Reasoning is not for the next turn's prompt.
        if case.told and WORD not in server.prompt and "thinking" not in case.choice:
            wrong.append((str(case), "the model is not told of it"))
    assert wrong == []
    assert served > 100
