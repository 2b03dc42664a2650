"""The OpenAPI document: every path is in it, it is valid, it says what becomes of each field."""

import re
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from starlette.routing import Route
from vllm.entrypoints.anthropic import api_router as anthropic
from vllm.entrypoints.openai.chat_completion import api_router as chat
from vllm.entrypoints.openai.completion import api_router as completion
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.serve.tokenize import api_router as tokenize

from conserve.apis import MESSAGES, TOKEN_PATHS, TURN_PATHS
from conserve.hints import NAMES
from conserve.identity import AGENT_HEADERS, FINAL_HEADER, HEADERS, PARENT_HEADERS
from conserve.settings import Settings
from deployments.engine.http_server import describe
from deployments.router import addons
from deployments.router.frontdoor import FrontDoor
from deployments.router.openapi import document
from deployments.router.upstream import EngineUnreachable, Upstream
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.router.fakes import a_door
from tests.unit.deployments.stub_table import StubTable, listed_engine

MODEL = "the-model"


@pytest.fixture(scope="module")
def engines_own() -> dict[str, Any]:
    """What an engine says, of vLLM's own paths."""
    app = FastAPI()
    for each in (chat, completion, anthropic, responses, tokenize):
        app.include_router(each.router)
    describe(app)
    made: dict[str, Any] = app.openapi()
    return made


@pytest.fixture(scope="module")
def whole(engines_own: dict[str, Any]) -> dict[str, Any]:
    return document(engines_own, [MODEL])


def request_schema(whole: dict[str, Any], path: str) -> dict[str, Any]:
    body = whole["paths"][path]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema: dict[str, Any] = whole["components"]["schemas"][name]
    return schema


def test_an_engine_describes_what_routers_ask_for_alone(engines_own: dict[str, Any]) -> None:
    assert set(engines_own["paths"]) == {*TURN_PATHS, *TOKEN_PATHS}


def test_every_path_is_in_it(whole: dict[str, Any]) -> None:
    added = addons.parts("app", "1", Settings())
    door = FrontDoor(Settings(), StubTable(engines=[]), "router", added)
    served: dict[str, set[str]] = {}
    for route in door._paths.routes:
        assert isinstance(route, Route)
        methods = served.setdefault(re.sub(r":\w+}", "}", route.path), set())
        methods |= {method.lower() for method in route.methods or ()} - {"head"}
    assert {path: set(operations) for path, operations in whole["paths"].items()} == served


def test_it_is_valid(whole: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(whole)
    schema.validate()
    for operation in schema.get_all_operations():
        operation.ok()  # Every reference in it leads somewhere.


@pytest.mark.parametrize("path", TURN_PATHS)
def test_it_says_what_becomes_of_a_turns_fields(whole: dict[str, Any], path: str) -> None:
    schema = request_schema(whole, path)
    fields = schema["properties"]
    assert fields["model"]["enum"] == [MODEL]
    assert "model" not in schema["required"]
    assert fields["kv_transfer_params"]["deprecated"]
    assert {"max_tokens", "max_output_tokens"} & set(fields)
    for name in ("conversation_id", "program_id", "session_id", "job_id"):
        assert fields[name]["anyOf"][0]["maxLength"] == 256
    for name in ("metadata", "prompt_cache_key", "nvext", "is_last_step"):
        assert "type" not in fields[name]  # Any JSON passes.
    # Of these vLLM has its own word, where it takes them.
    if path != MESSAGES:
        assert "default" in fields["priority"]
        assert "anyOf" in fields["vllm_xargs"]


def test_every_header_that_is_understood_is_in_it(whole: dict[str, Any]) -> None:
    turn = whole["paths"]["/v1/chat/completions"]["post"]["parameters"]
    described = whole["components"]["parameters"]
    names = [described[one["$ref"].rsplit("/", 1)[1]]["name"].lower() for one in turn]
    assert len(names) == len(set(names))
    hinted = {hint.name for hint in NAMES if not hint.in_body}
    understood = {*HEADERS, *AGENT_HEADERS, *PARENT_HEADERS, *hinted, FINAL_HEADER, "x-request-id"}
    assert set(names) == {name.lower() for name in understood}


def test_an_engine_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, engines_own: dict[str, Any]
) -> None:
    """And where the first is gone, another one."""
    asked: list[str] = []

    async def described(self: Upstream, url: str) -> dict[str, Any]:
        asked.append(url)
        if url == "gone":
            raise EngineUnreachable("no connection")
        return engines_own

    monkeypatch.setattr(Upstream, "described", described)
    door = a_door(StubTable(engines=[listed_engine("d", url=url) for url in ("gone", "there")]))
    for _ in range(2):
        answer = ask(door, "GET", "/openapi.json")
        assert answer.status_code == 200
        assert answer.json()["openapi"] == "3.1.0"
    assert asked == ["gone", "there"]


def test_without_an_engine_there_is_none_yet() -> None:
    door = a_door(StubTable(engines=[]))
    answer = ask(door, "GET", "/openapi.json")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
