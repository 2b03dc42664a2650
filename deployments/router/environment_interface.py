"""The paths of tool environments in OpenAPI's words; `interface` has all others."""

from typing import Any

from conserve.environments.spec import MAIN, MOST_PORTS, MOST_STDIN_CHARS, Limits, LimitsAsked

Json = dict[str, Any]

_COUNT: Json = {"type": "integer", "minimum": 0}
_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_NAME: Json = {"type": "string", "pattern": r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"}

PARAMETER: Json = {"name": "env", "in": "path", "required": True, "schema": _NAME}


def _object(optional: Json | None = None, /, **required: Json) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "properties": properties}


SCHEMAS: Json = {
    "EnvironmentAsked": {
        **_object(
            {
                "name": {**_NAME, "default": MAIN},
                "kind": {"type": "string", "enum": ["process", "container"], "default": "process"},
                "image": {**_TEXT_OR_NULL, "description": "A container's."},
                "limits": {
                    "type": ["object", "null"],
                    "description": "Below the application's.",
                    "properties": {name: {"type": "number"} for name in LimitsAsked.model_fields},
                    "additionalProperties": False,
                },
                "ports": {**_COUNT, "maximum": MOST_PORTS},
                "setup": {**_TEXT_OR_NULL, "description": "A command that is run once, first."},
                "shared": {
                    **_FLAG,
                    "description": "By the tenant's conversations that ask for it.",
                },
            }
        ),
        "additionalProperties": False,
    },
    "Environment": _object(
        id=_NAME,
        object={"const": "environment"},
        state={
            "type": "string",
            "enum": ["declared", "preparing", "ready", "failed", "removing"],
        },
        kind={"type": "string", "enum": ["process", "container"]},
        image=_TEXT_OR_NULL,
        isolation={"enum": ["namespaces", "limits", "container", None]},
        ports={"type": "array", "items": _COUNT},
        shared=_FLAG,
        holders=_COUNT,
        limits=_object(**{name: {"type": "number"} for name in Limits.model_fields}),
        error=_TEXT_OR_NULL,
    ),
    "Environments": _object(
        object={"const": "list"},
        data={"type": "array", "items": {"$ref": "#/components/schemas/Environment"}},
    ),
    "EnvironmentRemoved": _object(
        id=_NAME, object={"const": "environment.deleted"}, deleted={"const": True}
    ),
    "CommandAsked": {
        **_object(
            {
                "stdin": {"type": "string", "maxLength": MOST_STDIN_CHARS},
                "timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0},
                "tool": {
                    "type": "string",
                    "maxLength": 64,
                    "description": "What the agent calls it.",
                },
                "call_id": {
                    **_TEXT_OR_NULL,
                    "description": "Asked for twice with one, a command runs once.",
                },
            },
            command={
                "description": "Of a shell, or a program with its arguments.",
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                ],
            },
        ),
        "additionalProperties": False,
    },
    "CommandDone": _object(
        exit_code=_COUNT,
        stdout=_TEXT,
        stderr=_TEXT,
        truncated=_FLAG,
        timed_out=_FLAG,
        reason=_TEXT_OR_NULL,
        wall_s={"type": "number", "minimum": 0},
        isolation={"enum": ["namespaces", "limits", "container"]},
    ),
}


def paths(of: Json, errors: Json, body_errors: Json) -> Json:
    """The paths.

    Args:
        of: parameters of a conversation's paths.
        errors: answers of those that read no body.
        body_errors: answers of those that do.
    """
    env = {"$ref": "#/components/parameters/env"}

    def operation(name: str, summary: str, answer: str, *more: Json, asked: str = "") -> Json:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
        said: Json = {
            "operationId": name,
            "summary": summary,
            "parameters": [of, *more],
            "responses": {
                "200": {"description": "", "content": content},
                **(body_errors if asked else errors),
            },
        }
        if asked:
            schema = {"schema": {"$ref": f"#/components/schemas/{asked}"}}
            said["requestBody"] = {"required": True, "content": {"application/json": schema}}
        return said

    base = "/v1/conversations/{id}/environments"
    return {
        base: {
            "post": operation(
                "createEnvironment",
                "Have an environment for the conversation's tools; where the setting "
                "environments.enabled allows it",
                "Environment",
                asked="EnvironmentAsked",
            ),
            "get": operation("listEnvironments", "The conversation's environments", "Environments"),
        },
        base + "/{env}": {
            "get": operation("getEnvironment", "One environment", "Environment", env),
            "delete": operation(
                "removeEnvironment", "Have an environment no more", "EnvironmentRemoved", env
            ),
        },
        base + "/{env}/run": {
            "post": operation(
                "runCommand", "Run a command in an environment", "CommandDone", env,
                asked="CommandAsked",
            )
        },
    }  # fmt: skip
