"""The parameters, headers and fields of requests in OpenAPI's words, without vLLM's own fields."""

from typing import Any

from conserve import apis, budget, hints, identity
from conserve.environments.spec import LimitsAsked, Run, Spec
from conserve.events import KINDS
from conserve.fields import READ, UNSERVED
from conserve.pausing.tools import MOST_NAME_CHARS
from deployments.router import dashboard, events, request_ids, tool_reports

Json = dict[str, Any]

COUNT: Json = {"type": "integer", "minimum": 0}
TEXT: Json = {"type": "string"}
# An id as `conserve.identity` takes it.
ID: Json = {"type": "string", "maxLength": identity.MAX_ID_CHARS, "pattern": r"^[\x20-\x7e]*$"}
_SECONDS: Json = {"type": "number", "minimum": 0}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(optional: Json | None = None, /, **required: Json) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "properties": properties}


def _printable(most: int) -> Json:
    return {**TEXT, "minLength": 1, "maxLength": most, "pattern": r"^[\x20-\x7e]+$"}


# --- bodies of ConServe's own paths ---------------------------------------------------------------


def _body(model: type[Spec | Run], **descriptions: str) -> Json:
    """Return a model's schema with its fields described."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = schema["properties"]
    for name, description in descriptions.items():
        properties[name]["description"] = description
    return {
        "type": "object",
        "required": schema.get("required", []),
        "properties": properties,
        "additionalProperties": False,
    }


_ENVIRONMENT = _body(
    Spec,
    image="Image of a container; a process has none.",
    setup="A shell command that is run once, before any other.",
    shared="Whether the tenant's conversations that ask for this name share one environment.",
)
_ENVIRONMENT["properties"]["limits"] = {
    **_or_null(LimitsAsked.model_json_schema()),
    "description": "Limits below the application's.",
}
_ENVIRONMENT_NAME: Json = {**TEXT, "pattern": _ENVIRONMENT["properties"]["name"]["pattern"]}

BODIES: Json = {
    "EnvironmentAsked": _ENVIRONMENT,
    "CommandAsked": _body(
        Run,
        command="A shell command, or a program with its arguments.",
        timeout_s="How long it may take; null: as long as the environment's limit.",
        tool="The agent's name for the command, for /v1/events.",
        call_id="Names this call: asked for twice, the command runs once.",
    ),
    "ToolReport": _object(
        {"call_id": _or_null(_printable(tool_reports.MOST_CALL_ID_CHARS))},
        event={"type": "string", "enum": list(tool_reports.EVENTS)},
        tool=_printable(MOST_NAME_CHARS),
    ),
    "ReleaseAsked": _object(program_id={**ID, "minLength": 1, "pattern": r"^[\x21-\x7e]+$"}),
}

# --- parameters -----------------------------------------------------------------------------------

_NAMES = (
    "The conversation's id. The first that is not empty wins, of "
    + ", ".join(
        f"the body's {source.name}" if source.in_body else source.name
        for source in identity.SOURCES
    )
    + "; without any of them the conversation is recognised by its messages."
)


_WITHIN_A_DAY: Json = {**_SECONDS, "maximum": hints.MOST_S}
# The schemas of hints that must be valid.
_HINTS: Json = {
    "priority": {
        "type": "integer",
        "minimum": -hints.MOST_PRIORITY - 1,
        "maximum": hints.MOST_PRIORITY,
    },
    **dict.fromkeys(("deadline_s", "first_token_s", "expected_resume_s"), _WITHIN_A_DAY),
    "last_step": {"type": "string", "enum": ["true", "false"]},
    "expected_output_tokens": {**COUNT, "maximum": hints.MOST_OUTPUT_TOKENS},
}


def _in_header(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _in_path(name: str, schema: Json) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _in_query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


PARAMETERS: Json = {
    **{
        source.name: _in_header(source.name, ID if source.strict else TEXT, _NAMES)
        for source in identity.SOURCES
        if not source.in_body
    },
    **{
        name: _in_header(name, TEXT, f"An agent within the conversation. {sender}.")
        for name, sender in identity.AGENT_HEADERS.items()
        if name not in identity.HEADERS
    },
    **{
        hint.name: _in_header(
            hint.name,
            _HINTS[hint.meaning] if hint.must_be else TEXT,
            f"A hint, {hint.meaning}. {hint.source}'s name.",
        )
        for hint in hints.NAMES
        if not hint.in_body and hint.name != identity.FINAL_HEADER
    },
    "final": _in_header(
        identity.FINAL_HEADER, TEXT, "`true`: it is the conversation's last turn, and ends it."
    ),
    "request": _in_header(
        request_ids.HEADER,
        TEXT,
        "Names the request in its answer and in the engine's log. At most "
        f"{request_ids.MOST_CHARS} characters of printable ASCII; otherwise the router names it.",
    ),
    "model": _in_path("model", TEXT),
    "conversation": {
        **_in_path("id", {**TEXT, "minLength": 1}),
        "description": "Percent-encoded.",
    },
    "engine": _in_path("id", {**TEXT, "minLength": 1}),
    "env": _in_path("env", _ENVIRONMENT_NAME),
    "file": _in_path("file", {"type": "string", "enum": list(dashboard.FILES)}),
    "response": _in_path("id", {**TEXT, "pattern": r"^[\w.-]{1,100}$"}),
    "limit": _in_query(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 1000},
        "Most conversations that are listed.",
    ),
    "after": _in_query(
        "after",
        {**COUNT, "maximum": 10**events.MOST_DIGITS - 1},
        "The number of the last event that is known; without it, only new ones are told.",
    ),
    "kind": _in_query(
        "kind",
        {"type": "array", "items": {"type": "string", "enum": list(KINDS)}},
        "Events of these kinds alone.",
    ),
    "of": _in_query("conversation", TEXT, "Events of this conversation alone."),
    "tenant": _in_query("tenant", TEXT, "Events of this tenant's conversations alone."),
}


TURN_PARAMETERS = [name for name, parameter in PARAMETERS.items() if parameter["in"] == "header"]

# --- fields of turns' bodies ----------------------------------------------------------------------

# Fields that are not vLLM's.
BODY_FIELDS: Json = {name: {**_or_null(ID), "description": _NAMES} for name in identity.BODY_FIELDS}
# Fields that may hold ids or hints. Any value passes, and vLLM's own schema of a field stands.
READ_FIELDS: Json = {
    name: {"description": "May name the conversation, or hold hints about it."}
    for name in sorted(READ.difference(identity.BODY_FIELDS))
}
# Fields of vLLM's that a client cannot set, and the reason.
DROPPED = {"kv_transfer_params": "The router directs the handoff."}
_FUNCTION = _object(name=TEXT)
# The values that vLLM takes, and `allowed_tools`.
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


# Fields of one path that have another meaning here than in vLLM.
CHANGED: dict[str, Json] = {
    apis.CHAT: {**_unserved(apis.CHAT), "tool_choice": _TOOL_CHOICE},
    apis.COMPLETIONS: _unserved(apis.COMPLETIONS),
    apis.MESSAGES: _unserved(apis.MESSAGES),
    apis.RESPONSES: {
        **_unserved(apis.RESPONSES),
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
# Fields without which a request is refused, and what they must be.
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
