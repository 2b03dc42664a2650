"""The router's HTTP interface in OpenAPI's words: all of it but vLLM's fields in bodies.

A new path of `frontdoor` gets its entry here.
"""

from typing import Any

from conserve import apis, budget, hints, identity
from conserve.events import KINDS
from conserve.pausing.tools import MOST_NAME_CHARS
from conserve.served import UNSERVED
from conserve.wire import START_PHASES
from deployments.router import environment_interface, events, tool_reports

Json = dict[str, Any]

DESCRIPTION = """\
OpenAI's interface and Anthropic's, scheduled by the conversation. Every error has OpenAI's \
shape, under `/v1/messages` Anthropic's. A path that is not listed answers 404, another method on \
one that is listed 405. Preflights (CORS) of origins that are admitted are answered on every path, \
without a key."""

# An id as `conserve.identity` takes it.
_ID: Json = {"type": "string", "maxLength": identity.MAX_ID_CHARS, "pattern": r"^[\x20-\x7e]*$"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_SECONDS: Json = {"type": "number", "minimum": 0}
_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(optional: Json | None = None, /, **required: Json) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "properties": properties}


def _list_of(name: str, /, **more: Json) -> Json:
    items = {"type": "array", "items": _schema(name)}
    return _object(object={"const": "list"}, data=items, **more)


def _printable(most: int) -> Json:
    return {**_TEXT, "minLength": 1, "maxLength": most, "pattern": r"^[\x20-\x7e]+$"}


def _schema(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


# --- Errors ---------------------------------------------------------------------------------------

_STATUSES = {
    "400": "The request is wrong, or too long for the model's context.",
    "401": "A key is missing or not valid.",
    "403": "A web page of another origin asked, or the key may not do this.",
    "404": "There is no such thing: model, conversation, response or path.",
    "405": "The path does not have this method; `Allow` has those that it has.",
    "408": "The request was not whole in time.",
    "409": "The name is another environment's, or the environment could not be prepared.",
    "413": "The body is too long.",
    "415": "The body is not `application/json`.",
    "421": "The `Host` is not one of this server's.",
    "422": "The engine cannot process the request.",
    "429": "There is no room, or a limit is reached; see `Retry-After`.",
    "500": "The request failed here. With `x-should-retry: false`, it would fail again.",
    "501": "The model or the engine does not support this.",
    "503": "Nothing can serve this now; see `Retry-After`.",
    "504": "The engine was silent for too long.",
}


def _header(name: str) -> Json:
    return {"$ref": f"#/components/headers/{name}"}


# Before a status, in the names of answers on Anthropic's paths.
_ANTHROPIC = "anthropic-"


def _error(status: str, schema: str) -> Json:
    headers = {name: _header(name) for name in ("Retry-After", "x-should-retry")}
    if status == "405":
        headers["Allow"] = _header("Allow")
    return {
        "description": _STATUSES[status],
        "headers": headers,
        "content": {"application/json": {"schema": _schema(schema)}},
    }


RESPONSES = {
    **{status: _error(status, "Error") for status in _STATUSES},
    **{_ANTHROPIC + status: _error(status, "AnthropicError") for status in _STATUSES},
}

# What any path may answer.
_ANY = ("401", "403", "421", "500", "503")
# What one that reads a body may.
_BODY = ("400", "408", "413", "415")


def _errors(*statuses: str, prefix: str = "") -> Json:
    return {
        status: {"$ref": f"#/components/responses/{prefix}{status}"}
        for status in sorted({*statuses, *_ANY})
    }


HEADERS: Json = {
    "Allow": {"schema": _TEXT},
    "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
    "x-should-retry": {
        "description": "`false`: the same request will not do any better later.",
        "schema": {"type": "string", "enum": ["false"]},
    },
    "x-conversation-id": {
        "description": "Which conversation the turn belongs to.",
        "required": True,
        "schema": _ID,
    },
    "x-conserve-decoder": {
        "description": "Which decoder serves it.",
        "required": True,
        "schema": _TEXT,
    },
    "x-conserve-unserved-tools": {
        "description": "Kinds of tools that the request offers and the model is not shown, "
        "separated by commas.",
        "schema": _TEXT,
    },
}

# --- What a request may say beside its body -------------------------------------------------------

_NAMES = (
    "The conversation's id. The first that is not empty wins, of "
    + ", ".join(
        f"the body's {source.name}" if source.in_body else source.name
        for source in identity.SOURCES
    )
    + "; without any of them the conversation is recognised by its messages."
)


_WITHIN_A_DAY: Json = {**_SECONDS, "maximum": hints.MOST_S}
# Hints, where another value is refused.
_HINTS: Json = {
    "priority": {
        "type": "integer",
        "minimum": -hints.MOST_PRIORITY - 1,
        "maximum": hints.MOST_PRIORITY,
    },
    **dict.fromkeys(("deadline_s", "first_token_s", "expected_resume_s"), _WITHIN_A_DAY),
    "last_step": {"type": "string", "enum": ["true", "false"]},
    "expected_output_tokens": {**_COUNT, "maximum": hints.MOST_OUTPUT_TOKENS},
}


def _in_header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


PARAMETERS: Json = {
    **{
        source.name: _in_header(source.name, _ID if source.strict else _TEXT, _NAMES)
        for source in identity.SOURCES
        if not source.in_body
    },
    **{
        name: _in_header(name, _TEXT, f"An agent within the conversation. {sender}.")
        for name, sender in identity.AGENT_HEADERS.items()
        if name not in identity.HEADERS
    },
    **{
        hint.name: _in_header(
            hint.name,
            _HINTS[hint.meaning] if hint.must_be else _TEXT,
            f"A hint, {hint.meaning}. {hint.source}'s name.",
        )
        for hint in hints.NAMES
        if not hint.in_body and hint.name != identity.FINAL_HEADER
    },
    "final": _in_header(
        identity.FINAL_HEADER, _TEXT, "`true`: it is the conversation's last turn, and ends it."
    ),
    "request": _in_header(
        "x-request-id",
        {"type": "string"},
        "Names the request in the engine's log. At most 128 characters of printable ASCII.",
    ),
    "model": {"name": "model", "in": "path", "required": True, "schema": _TEXT},
    "conversation": {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "Percent-encoded.",
        "schema": {"type": "string", "minLength": 1},
    },
    "env": environment_interface.PARAMETER,
    "response": {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": r"^[\w.-]{1,100}$"},
    },
    "limit": {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 1000},
    },
    "after": {
        "name": "after",
        "in": "query",
        "description": "The number of the last event that is known; else only new ones are told.",
        "schema": {**_COUNT, "maximum": 10**events.MOST_DIGITS - 1},
    },
    "kind": {
        "name": "kind",
        "in": "query",
        "description": "Events of these kinds alone.",
        "schema": {"type": "array", "items": {"type": "string", "enum": list(KINDS)}},
    },
    "of": {
        "name": "conversation",
        "in": "query",
        "description": "Events of this conversation alone.",
        "schema": _TEXT,
    },
    "tenant": {
        "name": "tenant",
        "in": "query",
        "description": "Events of this tenant's conversations alone.",
        "schema": _TEXT,
    },
}


# What a turn may say in headers.
_TURN_PARAMETERS = [name for name, parameter in PARAMETERS.items() if parameter["in"] == "header"]


def _parameters(*names: str) -> list[Json]:
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


# Fields of a turn's body that are not vLLM's, or that mean something here.
BODY_FIELDS: Json = {
    name: {**_or_null(_ID), "description": _NAMES} for name in identity.BODY_FIELDS
}
# Others' fields that may name the conversation or hold hints: any value passes, and vLLM's word of
# them, where it has one, stands.
READ_FIELDS: Json = {
    name.split(".")[0]: {"description": "May name the conversation, or hold hints about it."}
    for name in (
        *(source.name for source in identity.SOURCES if source.in_body and not source.strict),
        *(hint.name for hint in hints.NAMES if hint.in_body),
    )
}
# Those that are vLLM's and that a client cannot set, and why.
DROPPED = {"kv_transfer_params": "The router directs the handoff."}
_FUNCTION = _object(name=_TEXT)
# vLLM's, and one more.
_TOOL_CHOICE = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        _object(type={"const": "function"}, function=_FUNCTION),
        _object(
            type={"const": "allowed_tools"},
            allowed_tools=_object(
                mode={"type": "string", "enum": ["auto", "required"]},
                tools={"type": "array", "minItems": 1, "items": _object(function=_FUNCTION)},
            ),
        ),
        {"type": "null"},
    ]
}


def _unserved(path: str) -> Json:
    return {
        name: {"description": f"Not served: {instead}.", "enum": [None]}
        for name, instead in UNSERVED[path].items()
    }


# Those of one path alone that mean something else here than to vLLM.
CHANGED: dict[str, Json] = {
    apis.CHAT: {**_unserved(apis.CHAT), "tool_choice": _TOOL_CHOICE},
    apis.MESSAGES: _unserved(apis.MESSAGES),
    apis.RESPONSES: {
        "background": {
            "description": "Not served: a turn ends with its client's connection.",
            "enum": [False, None],
        },
        "prompt": {"description": "Not served: no templates are kept.", "type": "null"},
        "request_id": {"description": "Dropped. The router names responses.", "deprecated": True},
        "store": {
            "type": ["boolean", "null"],
            "default": True,
            "description": "Whether the decoder keeps the response, as far as it has room.",
        },
        "previous_response_id": {
            "type": ["string", "null"],
            "description": "A response that a decoder keeps: its history comes before the input.",
        },
    },
}
# Those without which a turn is refused, and what they must be.
NEEDED: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": {"messages": {"minItems": 1}},
    "/v1/completions": {"prompt": {}},
    apis.MESSAGES: {"messages": {"minItems": 1}},
    apis.COUNT_TOKENS: {"messages": {"minItems": 1}},
    apis.RESPONSES: {"input": {}},
    "/tokenize": {},
    "/detokenize": {
        "tokens": {
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "maxItems": budget.MOST_TOKEN_IDS,
        }
    },
}

# --- What is answered -----------------------------------------------------------------------------

_USAGE = _object(
    {"prompt_tokens_details": _or_null(_object({"cached_tokens": _or_null(_COUNT)}))},
    prompt_tokens=_COUNT,
    total_tokens=_COUNT,
)


def _completion(kind: str, choice: Json) -> Json:
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "items": _object(index=_COUNT, **choice)},
        usage=_USAGE,
    )


SCHEMAS: Json = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
    ),
    "AnthropicError": _object(
        type={"const": "error"},
        error=_object(type=_TEXT, message=_TEXT),
        request_id=_or_null(_TEXT),
    ),
    "Message": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        content={"type": "array", "minItems": 1, "items": _object(type=_TEXT)},
        model=_TEXT,
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "TokenCount": _object(input_tokens=_COUNT),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status={"type": "string", "enum": ["completed", "incomplete"]},
        output={"type": "array", "items": _object(type=_TEXT)},
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "InputTokens": _object(object={"const": "response.input_tokens"}, input_tokens=_COUNT),
    "ResponseDeleted": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    "ChatCompletion": _completion("chat.completion", {"message": _object(role=_TEXT)}),
    "Completion": _completion("text_completion", {"text": _TEXT}),
    "Tokens": _object(
        {"token_strs": _or_null({"type": "array", "items": _TEXT})},
        count=_COUNT,
        max_model_len=_COUNT,
        tokens={"type": "array", "items": _COUNT},
    ),
    "Text": _object(prompt=_TEXT),
    "Model": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len={
            **_or_null(_COUNT),
            "description": "Tokens of prompt and output together; null before a decoder is there.",
        },
    ),
    "Models": _list_of("Model"),
    "Turn": _object(
        prompt_tokens=_COUNT,
        output_tokens=_COUNT,
        decoder_cached_tokens=_COUNT,
        lmcache_tokens=_COUNT,
    ),
    "Event": _object(kind={"type": "string", "enum": list(KINDS)}, at=_SECONDS),
    "Conversation": _object(
        {"events": {"type": "array", "items": _schema("Event")}},
        id=_TEXT,
        object={"const": "conversation"},
        phase={"type": "string", "enum": ["reasoning", "acting", "paused"]},
        turns=_COUNT,
        held_tokens=_COUNT,
        decoder=_or_null(_TEXT),
        moves=_COUNT,
        ttfet_s=_or_null(_SECONDS),
        created=_COUNT,
        age_s=_SECONDS,
        last_used=_COUNT,
        idle_s=_SECONDS,
        last_turn=_or_null(_schema("Turn")),
        energy_estimate_j=_or_null({"type": "number", "minimum": 0}),
        running_tools=_COUNT,
        histories={"type": "array", "minItems": 1, "items": _schema("History")},
        histories_total=_COUNT,
    ),
    "History": _object(
        phase={"type": "string", "enum": ["reasoning", "acting", "paused"]},
        turns=_COUNT,
        held_tokens=_COUNT,
        shared_tokens=_COUNT,
        decoder=_or_null(_TEXT),
        moves=_COUNT,
        age_s=_SECONDS,
        idle_s=_SECONDS,
        last_turn=_or_null(_schema("Turn")),
        hints={"type": "object"},
        called=_or_null(_TEXT),
        running_tools={"type": "array", "items": _schema("RunningTool")},
    ),
    "RunningTool": _object({"call_id": _TEXT}, tool=_TEXT, running_s=_SECONDS),
    "ToolReport": _object(
        {"call_id": _or_null(_printable(tool_reports.MOST_CALL_ID_CHARS))},
        event={"type": "string", "enum": list(tool_reports.EVENTS)},
        tool=_printable(MOST_NAME_CHARS),
    ),
    "ToolsRunning": _object(running_tools=_COUNT),
    "Conversations": _list_of("Conversation", total=_COUNT),
    "ConversationEnded": _object(
        id=_TEXT, object={"const": "conversation.deleted"}, deleted={"const": True}
    ),
    "Engine": _object(
        {
            "sm_slots": {
                **_COUNT,
                "description": "How many tenths of its GPU's SMs it has to itself, if its tier "
                "says.",
            },
            "sms": {**_COUNT, "description": "How many SMs those are."},
        },
        id=_TEXT,
        role={"type": "string", "enum": ["prefiller", "decoder"]},
        hosts={**_FLAG, "description": "Whether conversations are bound to it."},
        url=_TEXT,
        pid=_COUNT,
        leaving=_FLAG,
        capacity_tokens=_COUNT,
        max_model_len=_COUNT,
        max_batched_tokens=_COUNT,
        held_tokens=_or_null(_COUNT),
        conversations=_or_null(_COUNT),
        queued_tokens=_or_null(_COUNT),
        load=_or_null(_schema("EngineLoad")),
        handoff_s={
            "type": "object",
            "description": "By how much longer prompts of so many tokens took when they were "
            "handed over, as tried at its start.",
            "additionalProperties": _SECONDS,
        },
        tier=_TEXT,
        gpus={"type": "array", "items": _TEXT},
    ),
    "EngineLoad": _object(
        prefill_tokens={
            **_COUNT,
            "description": "Of the prompts that it has and has not computed yet, beyond what "
            "caches should have.",
        },
        decodes={**_COUNT, "description": "Requests past their first token."},
        step_s={
            **_or_null(_SECONDS),
            "description": "How long an iteration without a prefill has taken, over 30 s; null: "
            "there was none.",
        },
        prefill_tokens_per_s={
            **_or_null({"type": "number", "minimum": 0}),
            "description": "How fast it has computed prompts while it had any, over 30 s; null: "
            "it has computed none.",
        },
    ),
    "Engines": _list_of("Engine"),
    **environment_interface.SCHEMAS,
    "Program": _object(program_id={**_ID, "minLength": 1, "pattern": r"^[\x21-\x7e]+$"}),
    "ProgramReleased": _object(program_id=_TEXT, released=_FLAG),
    "Health": _object(
        {
            "starting": {
                "type": "object",
                "description": "Engines that are not ready yet, by what they do.",
                "properties": dict.fromkeys(START_PHASES, _COUNT),
            }
        },
        status={"type": "string", "enum": ["ok", "unavailable"]},
        prefillers=_COUNT,
        decoders=_COUNT,
    ),
}

# --- Paths ----------------------------------------------------------------------------------------


def _answer(schema: Json, description: str = "") -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _operation(
    name: str, summary: str, answers: Json, parameters: list[Json] | None = None
) -> Json:
    return {
        "operationId": name,
        "summary": summary,
        "parameters": parameters or [],
        "responses": answers,
    }


def _leads_to(operation: str, parameter: str) -> Json:
    """How a turn's conversation is handed to another operation."""
    return {
        "operationId": operation,
        "parameters": {parameter: "$response.header.x-conversation-id"},
    }


def _turn(name: str, summary: str, answer: str, end: str = "[DONE]", errors: str = "") -> Json:
    parameters = _parameters(*_TURN_PARAMETERS)
    served = {
        "description": "The answer; with `stream`, server-sent events, of which the last is "
        f"`{end}`, or an error where the turn could not be ended.",
        "headers": {name: _header(name) for name in ("x-conversation-id", "x-conserve-decoder")},
        "content": {
            "application/json": {"schema": _schema(answer)},
            "text/event-stream": {},
        },
        "links": {
            "conversation": _leads_to("getConversation", "id"),
            "next turn": _leads_to("createChatCompletion", identity.HEADERS[0]),
            "end": _leads_to("endConversation", "id"),
        },
    }
    refused = _errors("404", "422", "429", "501", "504", *_BODY, prefix=errors)
    return {"post": _operation(name, summary, {"200": served, **refused}, parameters)}


def _read(
    name: str, summary: str, schema: Json, *errors: str, parameters: list[Json] | None = None
) -> Json:
    return _operation(name, summary, {"200": _answer(schema), **_errors(*errors)}, parameters)


_RELEASE = _operation(
    "releaseProgram",
    "End a conversation, by its id as a program",
    {"200": _answer(_schema("ProgramReleased")), **_errors(*_BODY)},
)
_RELEASE["requestBody"] = {
    "required": True,
    "content": {"application/json": {"schema": _schema("Program")}},
}


_REPORT_TOOL = _read(
    "reportTool",
    "Say that a tool begins or is done, so that the conversation's room is kept for it",
    _schema("ToolsRunning"),
    "404",
    *_BODY,
    parameters=_parameters("conversation"),
)
_REPORT_TOOL["requestBody"] = {
    "required": True,
    "content": {"application/json": {"schema": _schema("ToolReport")}},
}


def _tokens(name: str, summary: str, answer: str, errors: str = "") -> Json:
    answers = {
        "200": _answer(_schema(answer)),
        **_errors("404", "422", "429", "501", "504", *_BODY, prefix=errors),
    }
    return {"post": _operation(name, summary, answers)}


_HEALTH = _read("getHealth", "Whether a prefiller and a decoder can serve", _schema("Health"))
_RESPONSES = _turn(
    "createResponse",
    "A turn, by OpenAI's Responses API",
    "Response",
    "response.completed` or `response.incomplete",
)
_RESPONSES["post"]["responses"]["200"]["headers"] |= {
    "x-conserve-unserved-tools": _header("x-conserve-unserved-tools")
}
_HEALTH["responses"]["503"] = _answer(
    {"anyOf": [_schema("Health"), _schema("Error")]}, "They cannot."
)

_METRICS = _read("getMetrics", "Prometheus metrics", _TEXT)
_METRICS["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT}}

_EVENTS = _read(
    "listenToEvents",
    "What happens from now on, or has happened since; it has no end",
    _TEXT,
    "400",
    "429",
    parameters=_parameters("after", "kind", "of", "tenant"),
)
_EVENTS["responses"]["200"]["content"] = {"text/event-stream": {"schema": _TEXT}}

PATHS: Json = {
    "/v1/chat/completions": _turn(
        "createChatCompletion", "A turn of a conversation", "ChatCompletion"
    ),
    "/v1/completions": _turn("createCompletion", "A bare completion", "Completion"),
    apis.MESSAGES: _turn(
        "createMessage", "A turn, by Anthropic's API", "Message", "message_stop", _ANTHROPIC
    ),
    apis.COUNT_TOKENS: _tokens(
        "countTokens", "What a turn's prompt would have in tokens", "TokenCount", _ANTHROPIC
    ),
    apis.RESPONSES: _RESPONSES,
    apis.COUNT_INPUT: _tokens(
        "countInputTokens", "What a response's prompt would have in tokens", "InputTokens"
    ),
    "/v1/responses/{id}": {
        "get": _read(
            "getResponse",
            "A response that a decoder keeps",
            _schema("Response"),
            "400",
            "404",
            parameters=_parameters("response"),
        ),
        "delete": _read(
            "deleteResponse",
            "Have a response forgotten",
            _schema("ResponseDeleted"),
            "404",
            parameters=_parameters("response"),
        ),
    },
    "/v1/responses/{id}/cancel": {
        "post": _read(
            "cancelResponse",
            "Cancel a response in the background; none is served",
            _schema("Response"),
            "404",
            *_BODY,
            parameters=_parameters("response"),
        )
    },
    "/tokenize": _tokens(
        "tokenize", "Tokens of a text or of messages, as an engine has them", "Tokens"
    ),
    "/detokenize": _tokens("detokenize", "Text of tokens, as an engine has it", "Text"),
    "/v1/models": {"get": _read("listModels", "The model served", _schema("Models"))},
    "/v1/models/{model}": {
        "get": _read(
            "getModel", "One model", _schema("Model"), "404", parameters=_parameters("model")
        )
    },
    "/v1/conversations": {
        "get": _read(
            "listConversations",
            "Live conversations, those used last first",
            _schema("Conversations"),
            "400",
            parameters=_parameters("limit"),
        )
    },
    "/v1/conversations/{id}": {
        "get": _read(
            "getConversation",
            "One conversation",
            _schema("Conversation"),
            "404",
            parameters=_parameters("conversation"),
        ),
        "delete": _read(
            "endConversation",
            "End a conversation",
            _schema("ConversationEnded"),
            "404",
            parameters=_parameters("conversation"),
        ),
    },
    "/v1/conversations/{id}/tools": {"post": _REPORT_TOOL},
    **environment_interface.paths(
        _parameters("conversation")[0],
        _errors("404"),
        _errors("404", "409", "429", "501", *_BODY),
    ),
    "/v1/engines": {"get": _read("listEngines", "Prefillers and decoders", _schema("Engines"))},
    "/v1/events": {"get": _EVENTS},
    "/programs/release": {"post": _RELEASE},
    "/health": {"get": _HEALTH},
    "/metrics": {"get": _METRICS},
    "/openapi.json": {"get": _read("getOpenapi", "This document", {"type": "object"})},
}
