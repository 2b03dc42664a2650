"""What OpenAI's published schema allows in a turn of Responses is served, or refused by name.

What a router passes on is judged here by vLLM's own classes, and made messages by its own code: it
never comes to complaints of theirs about some branch of a union.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)
from vllm.renderers.chat_utils import MM_PARSER_MAP

from conserve.apis import RESPONSES
from conserve.errors import ApiError
from conserve.media import Medium, make_name
from deployments.router.request import ClientRequest
from tests.published_schemas import Published, Variant
from tests.unit.deployments.asgi import read_turn

Json = dict[str, Any]

USER = {"role": "user", "content": "hello"}
FUNCTION = {"type": "function", "name": "x", "parameters": {"type": "object"}, "strict": None}
SERVED_ITEMS = {"message", "function_call", "function_call_output", "reasoning"}
# Of these kinds, what is refused, by the words that say so.
REFUSED_PLACES = {
    "<ResponseInputFileParam>": "parts of type 'input_file' are not served here",
    "<ResponseInputFileContentParam>": "parts of type 'input_file' are not served here",
    ".file_id": "names a file, and none are kept here",
    ".image_url=null": "image_url must be a string",
    ".encrypted_content": "can be read by the server alone that has made it",
    ".call_id=null": "call_id must be a string",
    "<ItemReference>": "must be item_reference where an item is named by its id",
}
# A GIF of one pixel.
_PIXEL = "R0lGODlhAQABAIAAAAAAAAAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
IMAGE = f"data:image/gif;base64,{_PIXEL}"
_PLAIN = f"image None {hashlib.sha256(b'null').hexdigest()}"
_NAME = make_name(None, base64.b64decode(_PIXEL), _PLAIN)
NAMED_IMAGE = Medium(_NAME, "image/gif", _PIXEL).url
PUBLISHED = Published(
    {
        "ResponseInputImageParam": {"image_url"},
        "ResponseInputImageContentParam": {"image_url"},
        "FunctionCallOutput": {"call_id"},
    },
    texts={"name": "x", "image_url": IMAGE},
    nulls=True,
)


def read(body: Json, **written: str) -> ClientRequest:
    """A request as a router understands it; some members of it as JSON that is written already."""
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    members += [f"{json.dumps(name)}: {text}" for name, text in written.items()]
    return read_turn(RESPONSES, f"{{{', '.join(members)}}}".encode())


def refusal(body: Json) -> ApiError | None:
    try:
        read(body)
    except ApiError as error:
        return error
    return None


def taken(request: ClientRequest) -> ResponsesRequest:
    """A request as vLLM takes it, from the bytes that an engine gets."""
    return ResponsesRequest(**json.loads(request.raw))


def messages_of(asked: ResponsesRequest) -> list[Json]:
    """What vLLM makes of a request's items, which is something that it can render."""
    messages: list[Any] = construct_input_messages(request_input=asked.input)
    for message in messages:
        assert isinstance(message, dict)
        assert isinstance(message["role"], str)
        assert isinstance(message.get("reasoning", ""), str)
        content = message.get("content")
        assert isinstance(content, str | list | None), message
        for part in content if isinstance(content, list) else ():
            assert isinstance(part, dict)
            assert part["type"] in MM_PARSER_MAP
            text = part.get("image_url" if part["type"] == "input_image" else "text")
            assert isinstance(text, str), part
    return messages


def meaning(messages: list[Json]) -> list[Json]:
    """What of messages a model is shown."""
    shown = ("role", "content", "reasoning", "tool_calls", "tool_call_id")
    return [{name: one[name] for name in shown if one.get(name) is not None} for one in messages]


def each(form: Any) -> list[Variant]:
    """The variants of a type, those that say the same once."""
    found: dict[str, Variant] = {}
    for one in PUBLISHED.variants(form):
        found.setdefault(json.dumps(one.value), one)
    return list(found.values())


def test_items_are_served_or_refused_by_name() -> None:
    served: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for one in each(ResponseInputItemParam):
        place, item = one.place, one.value
        body = {"input": [USER, item, USER]}
        if (error := refusal(body)) is not None:
            assert (error.status, str(error.param)[:8]) == (400, "input[1]"), place
            assert error.message.startswith(str(error.param))
            refused[place] = error.message
            continue
        first, *messages, last = messages_of(taken(read(body)))
        assert first["content"] == last["content"] == "hello"
        assert len(messages) == 1, place
        served[item.get("type") or "message"] += 1
    assert set(served) == SERVED_ITEMS
    assert min(served.values()) >= 10
    for place, message in refused.items():
        kind = message.partition("items of type '")[2].partition("'")[0]
        if kind:
            assert kind not in SERVED_ITEMS
        else:
            assert any(part in place and why in message for part, why in REFUSED_PLACES.items()), (
                place,
                message,
            )


ANSWER = [{"type": "output_text", "text": "a", "annotations": []}]
SHOWN = [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        # As clients write them who keep their own history.
        ({"role": "assistant", "content": ANSWER, "id": None, "status": None, "phase": None},
         SHOWN),
        ({"role": "assistant", "content": [{**ANSWER[0], "annotations": [{"type": "new"}]}]},
         SHOWN),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, SHOWN),
        # vLLM would read this one letter by letter.
        ({"type": "message", "role": "assistant", "content": "a", "id": "m",
          "status": "completed"}, SHOWN),
        # Nothing of it is lost.
        ({"role": "assistant", "content": [*ANSWER, {"type": "output_text", "text": "b"}]},
         [{"role": "assistant", "content": "a\nb"}]),
        ({"type": "reasoning", "id": None, "summary": []},
         [{"role": "assistant", "reasoning": ""}]),
        ({"type": "reasoning", "id": "r", "content": [], "encrypted_content": "",
          "summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text",
                                                              "text": "b"}]},
         [{"role": "assistant", "reasoning": "a\nb"}]),
        ({"type": "function_call_output", "call_id": "c", "id": None, "status": None,
          "output": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": None}]},
         [{"role": "tool", "tool_call_id": "c", "content": [{"type": "input_text",
                                                             "text": "x"}]}]),
        ({"role": "user", "content": [{"type": "input_image", "image_url": IMAGE,
                                       "detail": None, "file_id": None}]},
         [{"role": "user", "content": [{"type": "input_image", "image_url": NAMED_IMAGE,
                                        "detail": "auto"}]}]),
    ],
)  # fmt: skip
def test_an_item_means_what_it_says(item: Json, shown: list[Json]) -> None:
    # Between others, as a turn's history has it.
    asked = taken(read({"input": [USER, item, USER]}))
    assert meaning(messages_of(asked))[1:-1] == shown
    assert not should_continue_final_message(asked.input)


@pytest.mark.parametrize(
    ("item", "continued"),
    [
        ({"role": "user", "content": "a", "status": "incomplete"}, False),
        ({"type": "reasoning", "summary": [], "status": "in_progress"}, False),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{",
          "status": "incomplete"}, False),
        ({"role": "assistant", "content": "a", "status": "incomplete"}, True),
        ({"role": "assistant", "content": ANSWER, "status": "in_progress"}, True),
        ({"role": "assistant", "content": ANSWER, "status": "completed"}, False),
    ],
)  # fmt: skip
def test_only_an_answer_can_be_gone_on_with(item: Json, continued: bool) -> None:
    asked = taken(read({"input": [USER, item]}))
    assert should_continue_final_message(asked.input) is continued


def test_what_vllm_takes_goes_to_it_as_it_came() -> None:
    """As Codex sends it: a long history is not written anew for nothing."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "s"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]  # fmt: skip
    written = json.dumps(items, indent=1)
    request = read({"store": False, "tools": [FUNCTION]}, input=written)
    assert written.encode() in request.raw
    assert len(messages_of(taken(request))) == 4


# --- The request ----------------------------------------------------------------------------------

UNSERVED = {"background", "conversation", "context_management", "prompt", "moderation"}
# Of what is asked for by an id or a name, there is none here.
NAMES = {"input", "model", "tools", "previous_response_id"}


def test_fields_of_a_request_are_served_or_refused_by_name() -> None:
    refused = set()
    for one in each(ResponseCreateParamsBase):
        place = one.place
        name = re.split(r"[.=<[]", place.removeprefix("."))[0]
        if name in NAMES:
            continue
        body = {"input": "hello", "tools": [FUNCTION], **one.value}
        if (error := refusal(body)) is not None:
            assert (error.status, str(error.param).partition(".")[0]) == (400, name), place
            assert error.message.startswith(str(error.param))
            refused.add(name)
            continue
        asked = taken(read(body))
        sampling = asked.to_sampling_params(100)
        # What vLLM says of the request in each event.
        ResponsesResponse.from_request(asked, sampling, "m", 1, [], "in_progress")
        assert asked.tool_choice in ("auto", "none", "required") or asked.tool_choice.name == "x"
    assert refused == {*UNSERVED, "tool_choice"}


def test_null_is_what_is_left_out() -> None:
    plain = read({"input": "hello"})
    every = {name: None for name in ResponseCreateParamsBase.__annotations__ if name != "input"}
    request = read({"input": "hello", "stream": None, **every})
    assert request.body.keys() == plain.body.keys()
    assert taken(request).background is False


def test_tools_of_other_kinds_are_not_taken_in_silence() -> None:
    kinds = set()
    for one in each(ToolParam):
        place, tool = one.place, one.value
        kind = tool["type"]
        served = kind == "function" or (kind == "namespace" and tool["tools"])
        if kind == "namespace" and served:
            served = tool["tools"][0]["type"] == "function"
        if served:
            request = read({"input": "hello", "tools": [tool]})
            assert request.unserved_tools == ()
        else:
            kinds.add(kind)
            # Alone, it is refused by its name.
            with pytest.raises(ApiError, match=f"{kind!r} are not served") as error:
                read({"input": "hello", "tools": [tool]})
            assert (error.value.status, error.value.param) == (400, "tools[0].type"), place
            # Beside a function, it is left out, and the client is told.
            request = read({"input": "hello", "tools": [tool, FUNCTION]})
            assert request.unserved_tools == (() if kind == "namespace" and not tool["tools"]
                                              else _kinds(tool))  # fmt: skip
            assert request.body["tools"] == [FUNCTION]
        asked = taken(request)
        names = [one["function"]["name"] for one in construct_tool_dicts(asked.tools, "auto") or ()]
        assert names == (["x__x"] if kind == "namespace" and served else ["x"])
    assert {"web_search", "mcp", "custom", "local_shell", "code_interpreter"} < kinds


def _kinds(tool: Json) -> tuple[str, ...]:
    inner = tool["tools"] if tool["type"] == "namespace" else [tool]
    return tuple(one["type"] for one in inner)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_are_shown(mode: str) -> None:
    other = {**FUNCTION, "name": "y"}
    group = {"type": "namespace", "name": "n", "description": "", "tools": [FUNCTION, other]}
    allowed = [{"type": "function", "name": "x"}, {"type": "mcp", "server_label": "z"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    body = {"input": "hello", "tools": [FUNCTION, other, group], "tool_choice": choice}
    asked = taken(read(body))
    assert asked.tool_choice == mode
    names = [one["function"]["name"] for one in construct_tool_dicts(asked.tools, mode) or ()]
    assert names == ["x", "n__x"]
