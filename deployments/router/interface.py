"""The router's paths in OpenAPI's words; `openapi` adds vLLM's fields of requests.

A new path of `frontdoor` gets a line in `_OPERATIONS`. `deployments.answers` has what paths answer.
"""

import re
from http import HTTPStatus
from typing import Any

import msgspec

from conserve import apis, budget, hints, identity
from conserve.cache_account import MOST_MINUTES
from conserve.errors import AnthropicError, Error
from conserve.events import KINDS
from conserve.fields import READ, UNSERVED
from conserve.pausing.tools import MOST_NAME_CHARS
from deployments import answers
from deployments.router import addons, conversations, operators
from deployments.router.errors import ID_HEADER

Json = dict[str, Any]

DESCRIPTION = """\
OpenAI's interface and Anthropic's, scheduled by the conversation. Every error has OpenAI's \
shape, under `/v1/messages` Anthropic's. A path that is not listed answers 404, another method on \
one that is listed 405. Every answer has `X-Request-Id`: the request's own, or one of the \
router's; under `/v1/messages` `request-id`, too. Preflights (CORS) of origins that are admitted \
are answered on every path, without a key."""

TEXT: Json = {"type": "string"}
# An id as `conserve.identity` takes it.
ID: Json = {"type": "string", "maxLength": identity.MAX_ID_CHARS, "pattern": r"^[\x20-\x7e]*$"}
_NOT_EMPTY: Json = {**TEXT, "minLength": 1}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(optional: Json | None = None, /, **required: Json) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "properties": properties}


def _printable(most: int) -> Json:
    return {**_NOT_EMPTY, "maxLength": most, "pattern": r"^[\x20-\x7e]+$"}


def _whole(least: int, most: float) -> Json:
    return {"type": "integer", "minimum": least, "maximum": most}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": [*values]}


# --- bodies of ConServe's own paths ---------------------------------------------------------------

# What add-ons add to this interface.
_ADDED = addons.described()

BODIES: Json = {
    **{name: schema for added in _ADDED for name, schema in added.bodies.items()},
    "ToolReport": _object(
        {"call_id": _or_null(_printable(conversations.MOST_CALL_ID_CHARS))},
        event=_one_of(*conversations.EVENTS),
        tool=_printable(MOST_NAME_CHARS),
    ),
    "ReleaseAsked": _object(program_id={**ID, "minLength": 1, "pattern": r"^[\x21-\x7e]+$"}),
}

# --- parameters -----------------------------------------------------------------------------------

_WITHIN_A_DAY: Json = {"type": "number", "minimum": 0, "maximum": hints.MOST_S}
# The schemas of hints that must be valid.
_HINTS: Json = {
    "priority": _whole(-hints.MOST_PRIORITY - 1, hints.MOST_PRIORITY),
    **dict.fromkeys(("deadline_s", "first_token_s", "expected_resume_s"), _WITHIN_A_DAY),
    "last_step": _one_of("true", "false"),
}
_NAMES = "The conversation's id. The first that is not empty wins, of " + ", ".join(
    "body." * source.in_body + source.name for source in identity.SOURCES
)


def _in(where: str, name: str, schema: Json, description: str = "") -> Json:
    needed = {"required": True} if where == "path" else {}
    return {"name": name, "in": where, **needed, "schema": schema, "description": description}


_OF_TURNS = [
    *(
        _in("header", source.name, ID if source.strict else TEXT, _NAMES)
        for source in identity.SOURCES
        if not source.in_body
    ),
    *(
        _in("header", name, TEXT, f"An agent within the conversation. {sender}.")
        for name, sender in identity.AGENT_HEADERS.items()
        if name not in identity.HEADERS
    ),
    *(
        _in("header", name, TEXT, f"What began the conversation. {sender}.")
        for name, (sender, _) in identity.PARENT_HEADERS.items()
    ),
    *(
        _in("header", hint.name, _HINTS[hint.meaning] if hint.must_be else TEXT, hint.meaning)
        for hint in hints.NAMES
        if not hint.in_body and hint.name != identity.FINAL_HEADER
    ),
    _in("header", identity.FINAL_HEADER, TEXT, "`true`: the turn ends its conversation."),
    _in("header", ID_HEADER, TEXT, "Names the request in its answer and in logs."),
]
PARAMETERS: Json = {
    **{header["name"]: header for header in _OF_TURNS},
    "model": _in("path", "model", TEXT),
    "conversation": _in("path", "id", _NOT_EMPTY, "Percent-encoded."),
    "engine": _in("path", "id", _NOT_EMPTY),
    **{
        name: _in("path", name, schema)
        for added in _ADDED
        for name, schema in added.parameters.items()
    },
    "file": _in("path", "file", _one_of(*operators.DASHBOARD_FILES)),
    "response": _in("path", "id", {**TEXT, "pattern": r"^[\w.-]{1,100}$"}),
    "limit": _in("query", "limit", {**_whole(1, 10_000), "default": 1000}, "Most that are listed."),
    "minutes": _in("query", "minutes", {**_whole(1, MOST_MINUTES), "default": MOST_MINUTES}),
    "items": _in("query", "limit", {**_whole(1, 100), "default": 20}, "Most items."),
    "item": _in("query", "after", TEXT, "The id of the last item that is known."),
    "order": _in("query", "order", {**TEXT, "enum": ["asc", "desc"], "default": "desc"}, "By age."),
    "after": _in(
        "query", "after", _whole(0, 10**operators.MOST_DIGITS - 1), "The last one that is known."
    ),
    "kind": _in("query", "kind", {"type": "array", "items": _one_of(*KINDS)}, "Only these kinds."),
    "of": _in("query", "conversation", TEXT, "Events of this conversation alone."),
    "tenant": _in("query", "tenant", TEXT, "Events of this tenant's conversations alone."),
}

# --- fields of turns' bodies ----------------------------------------------------------------------

# Fields that are not vLLM's, and one of vLLM's that a client cannot set.
BODY_FIELDS: Json = {
    **{name: {**_or_null(ID), "description": _NAMES} for name in identity.BODY_FIELDS},
    "kv_transfer_params": {"description": "Dropped.", "deprecated": True},
}
# Fields that may hold ids or hints. Any value passes, and vLLM's own schema of a field stands.
READ_FIELDS: Json = {
    name: {"description": "May name the conversation, or hold hints about it."}
    for name in sorted(READ.difference(identity.BODY_FIELDS))
}
_FUNCTION = _object(name=TEXT)
# The values that vLLM takes, and `allowed_tools`.
_ALLOWED = _object(
    mode=_one_of("auto", "required"),
    tools={"type": "array", "minItems": 1, "items": _object(function=_FUNCTION)},
)
_TOOL_CHOICE = {
    "anyOf": [
        _one_of("none", "auto", "required"),
        _object(type={"const": "function"}, function=_FUNCTION),
        _object(type={"const": "allowed_tools"}, allowed_tools=_ALLOWED),
        {"type": "null"},
    ]
}
_UNSERVED: dict[str, Json] = {
    path: {
        name: {"description": f"Not served: {instead}.", "enum": [None]}
        for name, instead in fields.items()
    }
    for path, fields in UNSERVED.items()
}
# Fields of one path that have another meaning here than in vLLM.
CHANGED: dict[str, Json] = {
    apis.CHAT: {**_UNSERVED[apis.CHAT], "tool_choice": _TOOL_CHOICE},
    apis.COMPLETIONS: _UNSERVED[apis.COMPLETIONS],
    apis.MESSAGES: _UNSERVED[apis.MESSAGES],
    apis.RESPONSES: {
        **_UNSERVED[apis.RESPONSES],
        "background": {"description": "Not served.", "enum": [False, None]},
        "request_id": {"description": "Dropped. The router names responses.", "deprecated": True},
    },
}
# Fields without which a request is refused, and what they must be.
NEEDED: dict[str, dict[str, Json]] = {
    apis.CHAT: {"messages": {"minItems": 1}},
    apis.MESSAGES: {"messages": {"minItems": 1}},
    apis.COUNT_TOKENS: {"messages": {"minItems": 1}},
    apis.COMPLETIONS: {"prompt": {}},
    apis.RESPONSES: {"input": {}},
    apis.DETOKENIZE: {"tokens": {"items": _whole(0, 2**31 - 1), "maxItems": budget.MOST_TOKEN_IDS}},
}

# --- paths ----------------------------------------------------------------------------------------

# Method and path with its query; name; body>answers, which are schemas or media types; statuses
# beside those of its kind (`_paths`); summary.
_OPERATIONS = """
post /v1/chat/completions createChatCompletion ChatCompletion | A turn of a conversation
post /v1/completions createCompletion Completion | A bare completion
post /v1/messages createMessage Message | A turn, by Anthropic's API
post /v1/messages/count_tokens countTokens TokenCount | Tokens that a turn's prompt would have
post /v1/responses createResponse Response | A turn, by OpenAI's Responses API
post /v1/responses/input_tokens countInputTokens InputTokens | Tokens of a response's prompt
get /v1/responses/{id} getResponse Response 400 | A response that a decoder keeps
get /v1/responses/{id}/input_items?items?item?order listInputItems InputItems 400 | A response's \
input, the newest item first
delete /v1/responses/{id} deleteResponse ResponseDeleted | Forget a response
post /v1/responses/{id}/cancel cancelResponse Response 400 408 413 415 | Always refused
post /tokenize tokenize Tokens | Tokens of a text or of messages, as an engine has them
post /detokenize detokenize Text | Text of tokens, as an engine has it
get /v1/models listModels Models,AnthropicModels | The model served
get /v1/models/{model} getModel Model,AnthropicModel | One model
get /v1/conversations?limit listConversations Conversations 400 | Conversations, last used first
get /v1/conversations/{id} getConversation Conversation | One conversation
delete /v1/conversations/{id} endConversation ConversationEnded | End a conversation
post /v1/conversations/{id}/tools reportTool ToolReport>ToolsRunning | Say that a tool runs or ended
get /v1/cache?minutes getCache Cache 400 | Why prompt tokens were computed, by cause and client
get /v1/recording?after getRecording Recording 400 | Turns that have ended, without text
get /v1/engines listEngines Engines | Engines, the KV that they hold, and their work
post /v1/engines/{id}/drain drainEngine EngineDraining 409 415 | Give an engine nothing new, and \
have its conversations move between their turns
get /v1/events?after?kind?of?tenant listenToEvents text/event-stream 400 429 | Events as they \
happen, or since one; the stream has no end
get /dashboard getDashboard text/html | A page that shows conversations and engines
get /dashboard/{file} getDashboardFile text/javascript,text/css | A part of the dashboard
post /programs/release releaseProgram ReleaseAsked>ProgramReleased | End a conversation, by its id \
as a program
get /health getHealth Health | Whether a prefiller and a decoder can serve
get /live getLive Live | Say that this router's process answers
get /ready getReady Readiness | Whether this router can serve turns now
get /-/healthz getHealthz text/plain | `/ready` in Ray Serve's words: `success`, or why not
get /version getVersion Versions | Versions of what is installed, and the model
get /metrics getMetrics text/plain | Prometheus metrics
get /metrics/targets listMetricsTargets TargetsList | Addresses of metrics, for `http_sd_configs`
get /openapi.json getOpenapi Document | These paths and their schemas, in OpenAPI 3.1
"""
# Answers with 503 that are no errors: there is nothing that can serve.
_UNAVAILABLE = {"/health": "Health,Error", "/ready": "Readiness", "/-/healthz": "text/plain"}

# Statuses of any path, of those that read a body, and of those that ask an engine.
_ANY = ("401", "403", "421", "500", "503")
_BODY = ("400", "408", "413", "415")
_ENGINE = ("404", "422", "429", "501", "504", *_BODY)


def _ref(section: str, name: str) -> Json:
    return {"$ref": f"#/components/{section}/{name}"}


_THEIRS = [struct for added in _ADDED for struct in added.answers]
_STRUCTS = [
    one
    for one in (*vars(answers).values(), *_THEIRS, Error, AnthropicError)
    if isinstance(one, type) and issubclass(one, msgspec.Struct)
]
SCHEMAS: Json = {
    **msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")[1],
    **BODIES,
    "TargetsList": {"type": "array", "items": _ref("schemas", "Targets")},
    "Document": {"type": "object"},
}


def _content(names: str) -> Json:
    """Return the content of a body of one of these schemas or media types."""
    medias = {name: {"schema": TEXT} for name in names.split(",") if "/" in name}
    schemas = [_ref("schemas", name) for name in names.split(",") if "/" not in name]
    if schemas:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        medias["application/json"] = {"schema": schema}
    return medias


def _error(status: str, kind: type) -> Json:
    headers = {name: _ref("headers", name) for name in ("Retry-After", "x-should-retry")}
    content = _content(kind.__name__)
    return {"description": HTTPStatus(int(status)).phrase, "headers": headers, "content": content}


COMPONENTS: Json = {
    "schemas": SCHEMAS,
    "responses": {
        shape + status: _error(status, kind)
        for shape, kind in (("", Error), ("anthropic-", AnthropicError))
        for status in (*_ANY, *_ENGINE, "409")
    },
    "headers": {
        "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
        "x-should-retry": {"schema": {"type": "string", "enum": ["false"]}},
        "x-conversation-id": {"required": True, "schema": ID},
        "x-conserve-decoder": {"required": True, "schema": TEXT},
        "x-conserve-unserved-tools": {
            "description": "Kinds of tools that the model is not shown, separated by commas.",
            "schema": TEXT,
        },
        "x-conserve-ignored-fields": {
            "description": "Fields of the request that have no effect, separated by commas.",
            "schema": TEXT,
        },
    },
    "parameters": PARAMETERS,
}


def _turns_answer(path: str, content: Json) -> Json:
    """Describe a turn's answer: its stream, its headers, and requests that may follow it."""
    ends = " or ".join(f"`{end.decode().strip()}`" for end in apis.form_of(path).ends)
    headers = ["x-conversation-id", "x-conserve-decoder", "x-conserve-ignored-fields"]
    headers += ["x-conserve-unserved-tools"] * (path == apis.RESPONSES)
    following = (
        ("conversation", "getConversation", "id"),
        ("next turn", "createChatCompletion", identity.HEADERS[0]),
        ("end", "endConversation", "id"),
    )
    return {
        "description": f"With `stream`, events; the last begins with {ends}, or is an error.",
        "content": {**content, "text/event-stream": {}},
        "headers": {header: _ref("headers", header) for header in headers},
        "links": {
            link: {"operationId": operation, "parameters": {name: f"$response.header.{headers[0]}"}}
            for link, operation, name in following
        },
    }


def _paths() -> Json:
    paths: Json = {}
    operations = "".join([_OPERATIONS, *(added.operations for added in _ADDED)])
    for line in filter(None, operations.splitlines()):
        operation, _, summary = line.partition(" | ")
        method, asked, name, kinds, *statuses = operation.split()
        path, *parameters = asked.split("?")
        body, _, answer = kinds.rpartition(">")
        content = _content(answer)
        turn = path in apis.TURN_PATHS
        if turn or path in (*apis.TOKEN_PATHS, apis.COUNT_INPUT):
            statuses += _ENGINE
        statuses += [*_ANY, *(_BODY if body else ()), *(("404",) if "{" in path else ())]
        shape = "anthropic-" if apis.is_anthropic(path) else ""
        responses = {
            "200": _turns_answer(path, content) if turn else {"description": "", "content": content}
        }
        responses |= {status: _ref("responses", shape + status) for status in sorted(statuses)}
        if path in _UNAVAILABLE:
            unavailable = _content(_UNAVAILABLE[path])
            responses["503"] = {"description": "Nothing can serve now.", "content": unavailable}
        parameters += [header["name"] for header in _OF_TURNS if turn]
        # An id is that of one of what the path lists.
        kind = path.split("/")[2].rstrip("s") if "{id}" in path else ""
        parameters += [kind if each == "id" else each for each in re.findall(r"{(\w+)}", path)]
        paths.setdefault(path, {})[method] = {
            "operationId": name,
            "summary": summary,
            "parameters": [_ref("parameters", each) for each in parameters],
            **({"requestBody": {"required": True, "content": _content(body)}} if body else {}),
            "responses": responses,
        }
    return paths


PATHS: Json = _paths()
