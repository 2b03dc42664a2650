"""The router's paths in OpenAPI's words; `openapi` adds vLLM's fields of requests.

A new path of `frontdoor` gets its entry here. `deployments.answers` has what paths answer.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from conserve import apis, identity
from conserve.errors import AnthropicError, Error
from deployments import answers
from deployments.router import dashboard
from deployments.router.parameters import BODIES, ID, PARAMETERS, TEXT, TURN_PARAMETERS
from deployments.router.probes import HEALTHZ, LIVE, READY, VERSION

Json = dict[str, Any]

DESCRIPTION = """\
OpenAI's interface and Anthropic's, scheduled by the conversation. Every error has OpenAI's \
shape, under `/v1/messages` Anthropic's. A path that is not listed answers 404, another method on \
one that is listed 405. Every answer has `X-Request-Id`: the request's own, or one of the \
router's; under `/v1/messages` `request-id`, too. Preflights (CORS) of origins that are admitted \
are answered on every path, without a key."""

_COMPONENTS = "#/components"
_STRUCTS = [
    one
    for one in (*vars(answers).values(), Error, AnthropicError)
    if isinstance(one, type) and issubclass(one, msgspec.Struct)
]
SCHEMAS: Json = {
    **msgspec.json.schema_components(_STRUCTS, ref_template=f"{_COMPONENTS}/schemas/{{name}}")[1],
    **BODIES,
}


def _ref(section: str, name: str) -> Json:
    return {"$ref": f"{_COMPONENTS}/{section}/{name}"}


def _content(*kinds: type | str) -> Json:
    """Return the content of a body of one of these schemas."""
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in kinds]
    schemas = [_ref("schemas", name) for name in names]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"application/json": {"schema": schema}}


# --- errors and headers ---------------------------------------------------------------------------

_STATUSES = {
    "400": "The request is wrong, or too long for the model's context.",
    "401": "A key is missing or not valid.",
    "403": "A web page of another origin asked, or the key may not do this.",
    "404": "There is no such thing: model, conversation, response or path.",
    "405": "The path does not have this method; `Allow` has those that it has.",
    "408": "The request was not whole in time.",
    "409": "The name is another environment's, or the environment could not be prepared; or no "
    "other engine can take the conversations.",
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
# Prefix of the names of errors in Anthropic's shape.
_ANTHROPIC = "anthropic-"


def _error(status: str, kind: type) -> Json:
    names = ["Retry-After", "x-should-retry"] + ["Allow"] * (status == "405")
    headers = {name: _ref("headers", name) for name in names}
    return {"description": _STATUSES[status], "headers": headers, "content": _content(kind)}


_ERRORS = {
    **{status: _error(status, Error) for status in _STATUSES},
    **{_ANTHROPIC + status: _error(status, AnthropicError) for status in _STATUSES},
}
# Errors of any path, of those that read a body, and of those that ask an engine.
_ANY = ("401", "403", "421", "500", "503")
_BODY = ("400", "408", "413", "415")
_ENGINE = ("404", "422", "429", "501", "504", *_BODY)

_HEADERS: Json = {
    "Allow": {"schema": TEXT},
    "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
    "x-should-retry": {
        "description": "`false`: the same request will not do any better later.",
        "schema": {"type": "string", "enum": ["false"]},
    },
    "x-conversation-id": {
        "description": "The conversation that the turn belongs to.",
        "required": True,
        "schema": ID,
    },
    "x-conserve-decoder": {
        "description": "The decoder that serves the turn.",
        "required": True,
        "schema": TEXT,
    },
    "x-conserve-unserved-tools": {
        "description": "Kinds of tools that the request offers and the model is not shown, "
        "separated by commas.",
        "schema": TEXT,
    },
    "x-conserve-ignored-fields": {
        "description": "Fields of the request that have no effect, separated by commas.",
        "schema": TEXT,
    },
}

COMPONENTS: Json = {
    "schemas": SCHEMAS,
    "responses": _ERRORS,
    "headers": _HEADERS,
    "parameters": PARAMETERS,
}

# --- paths ----------------------------------------------------------------------------------------


def _operation(
    name: str,
    summary: str,
    answer: Json | type | str,
    *errors: str,
    parameters: Sequence[str] = (),
    body: str = "",
    shape: str = "",
) -> Json:
    """Describe one method of a path.

    Args:
        answer: the schema's struct or name, or the content.
        errors: statuses beside those of any path, and of any with a body.
        body: the name of the body's schema; empty: it has none, or `openapi` adds it.
        shape: prefix of the errors' names.
    """
    content = answer if isinstance(answer, dict) else _content(answer)
    statuses = {*errors, *_ANY, *(_BODY if body else ())}
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [_ref("parameters", one) for one in parameters],
        **({"requestBody": {"required": True, "content": _content(body)}} if body else {}),
        "responses": {
            "200": {"description": "", "content": content},
            **{status: _ref("responses", shape + status) for status in sorted(statuses)},
        },
    }


def _turn(name: str, summary: str, answer: type, end: str = "[DONE]", shape: str = "") -> Json:
    """Describe a path that takes turns.

    Args:
        end: the last event of a stream.
    """
    content = {**_content(answer), "text/event-stream": {}}
    turn = _operation(name, summary, content, *_ENGINE, parameters=TURN_PARAMETERS, shape=shape)
    conversation = "$response.header.x-conversation-id"
    following = (
        ("conversation", "getConversation", "id"),
        ("next turn", "createChatCompletion", identity.HEADERS[0]),
        ("end", "endConversation", "id"),
    )
    turn["responses"]["200"] |= {
        "description": "The answer; with `stream`, server-sent events, of which the last is "
        f"`{end}`, or an error where the turn could not be ended.",
        "headers": {
            header: _ref("headers", header)
            for header in ("x-conversation-id", "x-conserve-decoder", "x-conserve-ignored-fields")
        },
        "links": {
            link: {"operationId": operation, "parameters": {parameter: conversation}}
            for link, operation, parameter in following
        },
    }
    return {"post": turn}


def _tokens(name: str, summary: str, answer: type, shape: str = "") -> Json:
    return {"post": _operation(name, summary, answer, *_ENGINE, shape=shape)}


_RESPONSES = _turn(
    "createResponse",
    "A turn, by OpenAI's Responses API",
    answers.Response,
    "response.completed` or `response.incomplete",
)
_RESPONSES["post"]["responses"]["200"]["headers"] |= {
    "x-conserve-unserved-tools": _ref("headers", "x-conserve-unserved-tools")
}

_HEALTH = _operation("getHealth", "Whether a prefiller and a decoder can serve", answers.Health)
_HEALTH["responses"]["503"] = {
    "description": "No engine can serve requests now, or the table is being restarted.",
    "content": _content(answers.Health, Error),
}

_READY = _operation("getReady", "Whether this router can serve turns now", answers.Readiness)
_READY["responses"]["503"] = {
    "description": "It cannot, or drains.",
    "content": _content(answers.Readiness),
}
_HEALTHZ = _operation(
    "getHealthz",
    "The same in Ray Serve's words: `success`, or why not",
    {"text/plain": {"schema": TEXT}},
)
_HEALTHZ["responses"]["503"] = {
    "description": "It cannot, or drains.",
    "content": {"text/plain": {"schema": TEXT}},
}

_ENVIRONMENTS = "/v1/conversations/{id}/environments"
_ASKED_OF_ENVIRONMENTS = ("404", "409", "429", "501")

_PAGE = {"text/html": {"schema": TEXT}}
_PAGE_PART = {"text/javascript": {"schema": TEXT}, "text/css": {"schema": TEXT}}

PATHS: Json = {
    apis.CHAT: _turn("createChatCompletion", "A turn of a conversation", answers.ChatCompletion),
    "/v1/completions": _turn("createCompletion", "A bare completion", answers.Completion),
    apis.MESSAGES: _turn(
        "createMessage", "A turn, by Anthropic's API", answers.Message, "message_stop", _ANTHROPIC
    ),
    apis.COUNT_TOKENS: _tokens(
        "countTokens", "Tokens that a turn's prompt would have", answers.TokenCount, _ANTHROPIC
    ),
    apis.RESPONSES: _RESPONSES,
    apis.COUNT_INPUT: _tokens(
        "countInputTokens", "Tokens that a response's prompt would have", answers.InputTokens
    ),
    "/v1/responses/{id}": {
        "get": _operation(
            "getResponse", "A response that a decoder keeps", answers.Response, "400", "404"
        ),
        "delete": _operation(
            "deleteResponse", "Have a response forgotten", answers.ResponseDeleted, "404"
        ),
    },
    "/v1/responses/{id}/cancel": {
        "post": _operation(
            "cancelResponse",
            "Cancel a response in the background; none is served",
            answers.Response,
            "404",
            *_BODY,
        )
    },
    apis.TOKENIZE: _tokens(
        "tokenize", "Tokens of a text or of messages, as an engine has them", answers.Tokens
    ),
    apis.DETOKENIZE: _tokens("detokenize", "Text of tokens, as an engine has it", answers.Text),
    "/v1/models": {
        "get": _operation(
            "listModels", "The model served", _content(answers.Models, answers.AnthropicModels)
        )
    },
    "/v1/models/{model}": {
        "get": _operation(
            "getModel", "One model", _content(answers.Model, answers.AnthropicModel), "404"
        )
    },
    "/v1/conversations": {
        "get": _operation(
            "listConversations",
            "Live conversations, those used last first",
            answers.Conversations,
            "400",
            parameters=["limit"],
        )
    },
    "/v1/conversations/{id}": {
        "get": _operation("getConversation", "One conversation", answers.Conversation, "404"),
        "delete": _operation(
            "endConversation", "End a conversation", answers.ConversationEnded, "404"
        ),
    },
    "/v1/conversations/{id}/tools": {
        "post": _operation(
            "reportTool",
            "Say that a tool begins or is done, so that the conversation's room is kept for it",
            answers.ToolsRunning,
            "404",
            body="ToolReport",
        )
    },
    _ENVIRONMENTS: {
        "post": _operation(
            "createEnvironment",
            "Make an environment for the conversation's tools, if the setting "
            "environments.enabled allows it",
            answers.Environment,
            *_ASKED_OF_ENVIRONMENTS,
            body="EnvironmentAsked",
        ),
        "get": _operation(
            "listEnvironments", "The conversation's environments", answers.Environments, "404"
        ),
    },
    _ENVIRONMENTS + "/{env}": {
        "get": _operation("getEnvironment", "One environment", answers.Environment, "404"),
        "delete": _operation(
            "removeEnvironment", "Give an environment up", answers.EnvironmentRemoved, "404"
        ),
    },
    _ENVIRONMENTS + "/{env}/run": {
        "post": _operation(
            "runCommand",
            "Run a command in an environment",
            answers.CommandDone,
            *_ASKED_OF_ENVIRONMENTS,
            body="CommandAsked",
        )
    },
    "/v1/engines": {"get": _operation("listEngines", "Prefillers and decoders", answers.Engines)},
    "/v1/engines/{id}/drain": {
        "post": _operation(
            "drainEngine",
            "Give an engine nothing new, and have its conversations move between their turns",
            answers.EngineDraining,
            "404",
            "409",
            "415",
        )
    },
    "/v1/events": {
        "get": _operation(
            "listenToEvents",
            "What happens from now on, or has happened since; it has no end",
            {"text/event-stream": {"schema": TEXT}},
            "400",
            "429",
            parameters=["after", "kind", "of", "tenant"],
        )
    },
    dashboard.PATH: {
        "get": _operation("getDashboard", "A page that shows all of this as it happens", _PAGE)
    },
    dashboard.PATH + "/{file}": {
        "get": _operation("getDashboardFile", "A part of that page", _PAGE_PART, "404")
    },
    "/programs/release": {
        "post": _operation(
            "releaseProgram",
            "End a conversation, by its id as a program",
            answers.ProgramReleased,
            body="ReleaseAsked",
        )
    },
    "/health": {"get": _HEALTH},
    LIVE: {"get": _operation("getLive", "That this router's process answers", answers.Live)},
    READY: {"get": _READY},
    HEALTHZ: {"get": _HEALTHZ},
    VERSION: {
        "get": _operation("getVersion", "What is installed, and the model", answers.Versions)
    },
    "/metrics": {
        "get": _operation("getMetrics", "Prometheus metrics", {"text/plain": {"schema": TEXT}})
    },
    "/metrics/targets": {
        "get": _operation(
            "listMetricsTargets",
            "Where engines and LMCache servers have metrics, for `http_sd_configs`",
            {
                "application/json": {
                    "schema": {"type": "array", "items": _ref("schemas", "Targets")}
                }
            },
        )
    },
    "/openapi.json": {
        "get": _operation(
            "getOpenapi", "This document", {"application/json": {"schema": {"type": "object"}}}
        )
    },
}
for _path, _operations in PATHS.items():
    _id = "response" if _path.startswith(apis.RESPONSES) else "conversation"
    _id = "engine" if _path.startswith("/v1/engines/") else _id
    _names = [_id if name == "id" else name for name in re.findall(r"\{(\w+)\}", _path)]
    for _one in _operations.values():
        _one["parameters"] += [_ref("parameters", name) for name in _names]
