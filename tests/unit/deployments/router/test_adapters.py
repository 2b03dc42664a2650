"""Turns with an adapter, as a router reads them and tells engines of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from conserve import identity
from conserve.adapters import Adapter, adapter_in, of_model
from conserve.apis import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, MESSAGES, RESPONSES, TOKENIZE
from conserve.embedded import model_path
from conserve.errors import ApiError
from conserve.settings import Settings, load
from conserve.tenants import Caller, Limits
from deployments.router import tokens
from deployments.router.reading import Lifted
from deployments.router.request import ClientRequest
from tests.adapter_files import make_adapter
from tests.unit.deployments.asgi import a_reader, ask, read_turn
from tests.unit.deployments.router.fakes import a_door
from tests.unit.deployments.stub_table import StubTable

MODEL = "conserve-embedded"
HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    CHAT: {"messages": HELLO},
    MESSAGES: {"messages": HELLO, "max_tokens": 5},
    RESPONSES: {"input": "hello"},
    COMPLETIONS: {"prompt": "hello"},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = tmp_path_factory.mktemp("made")
    folders = {name: make_adapter(made / name, model_path(), ord(name)) for name in "ab"}
    return load({"adapters": {name: str(path) for name, path in folders.items()}})


def read(
    settings: Settings, model: str | None, path: str = CHAT, headers: Any = None, **more: Any
) -> ClientRequest:
    scope = {"conserve.caller": more.pop("caller")} if "caller" in more else {}
    body = {**BODIES[path], "model": model, **more}
    return read_turn(path, body, settings=settings, headers=headers or {}, **scope)


@pytest.mark.parametrize("path", BODIES)
def test_an_adapters_turns_share_nothing_with_any_others(path: str, settings: Settings) -> None:
    """Engines get its adapter, and a salt of its own; its history is another one."""
    callers = (None, Caller("acme", False, Limits(), "salt"))
    seen: dict[str, set[Any]] = {"salts": set(), "histories": set(), "digests": set()}
    for model in (MODEL, "a", "b"):
        for caller in callers:
            given = {} if caller is None else {"caller": caller}
            asked = read(settings, model, path, {"X-Conversation-Id": "c"}, **given)
            sent = json.loads(asked.raw)
            own = None if model == MODEL else adapter_in(model, settings.adapters[model])
            assert asked.adapter == of_model(sent["model"]) == own
            assert (asked.model_name, asked.model) == (model, sent["model"])
            salt = None if caller is None else caller.cache_salt
            assert sent.get("cache_salt") == (salt if own is None else own.salt(salt))
            # The client ends it by its own name.
            assert asked.explicit_id is not None
            assert identity.own_id(asked.explicit_id) == "c"
            seen["salts"].add(sent.get("cache_salt"))
            chain = asked.chain
            seen["histories"].add(asked.explicit_id if chain is None else chain.root)
            seen["digests"].add(asked.digest)
    assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(seen, 6)


def test_a_clients_own_salt_counts_too(settings: Settings) -> None:
    salts = [json.loads(read(settings, "a", cache_salt=one).raw)["cache_salt"] for one in "xy"]
    assert salts == [adapter_in("a", settings.adapters["a"]).salt(one) for one in "xy"]
    # vLLM refuses it.
    assert json.loads(read(settings, "a", cache_salt=7).raw)["cache_salt"] == 7


def test_one_that_there_is_not_is_refused(settings: Settings) -> None:
    with pytest.raises(ApiError) as refused:
        read(settings, "c")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert read(settings, None).adapter is read(Settings(), MODEL).adapter is None


def test_tokens_are_the_models_own(settings: Settings) -> None:
    bodies = {TOKENIZE: BODIES[CHAT], DETOKENIZE: {"tokens": [5]}, COUNT_TOKENS: BODIES[CHAT]}
    for path, body in bodies.items():
        judged, _ = tokens._JUDGED[path]
        raw = json.dumps({**body, "model": "a"}).encode()
        assert json.loads(judged(None, a_reader(settings), Lifted(raw)))["model"] == MODEL


def test_they_are_listed_as_models(settings: Settings) -> None:
    door = a_door(StubTable(engines=[]), settings)
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        listed = ask(door, "GET", "/v1/models", headers=headers).json()["data"]
        assert [one["id"] for one in listed] == [MODEL, "a", "b"]
        assert ask(door, "GET", "/v1/models/b", headers=headers).json() == listed[2]
    assert ask(door, "GET", "/v1/models/c").status_code == 404


def test_an_adapter_of_the_file_is_told_in_the_same_way(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    digest = "0" * 64
    content = {"version": 1, "adapters": [{"name": "c", "path": "/c", "digest": digest}]}
    file.write_text(json.dumps(content))
    both = settings.model_copy(update={"adapters_file": str(file)})
    assert read(both, "c").adapter == Adapter("c", "/c", digest)
    assert read(both, "a").adapter == read(settings, "a").adapter
