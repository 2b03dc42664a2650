"""Several models behind one door: their settings, and their names."""

import pickle
from typing import Any

import pytest

from conserve.errors import ApiError
from conserve.models import Names
from conserve.settings import Settings, SettingsError, load

TWO = {
    "big": {"model": "embedded", "decoders": 2, "aliases": ["claude-*", "gpt-5"]},
    "small": {"model": "embedded", "prefillers": 0, "aliases": ["claude-haiku-*"]},
}


def two(**common: Any) -> Settings:
    return load({"models": TWO, **common})


def test_a_model_has_its_own_settings_over_what_all_have() -> None:
    settings = two(port=8001, engine={"max_num_seqs": 8}, prefillers={"num_cpus": 2})
    big, small = settings.each.values()
    assert [big.model_id, small.model_id] == list(settings.each) == ["big", "small"]
    assert (big.port, big.engine, big.decoders.replicas) == (8001, {"max_num_seqs": 8}, 2)
    # A number beside what all have of the same role.
    assert (small.prefillers.replicas, small.prefillers.num_cpus) == (0, 2)
    # Engines and the table get them from another process.
    assert list(pickle.loads(pickle.dumps(settings)).each) == ["big", "small"]


def test_what_all_have_changes_in_each() -> None:
    settings = two().on_nodes(2)
    assert {own.nodes for own in (settings, *settings.each.values())} == {"several"}


def test_a_single_model_is_what_it_was() -> None:
    settings = load({"model": "embedded", "decoders": 3})
    assert settings.each == {"conserve-embedded": settings}
    assert settings.slug == ""


def test_they_can_be_given_on_a_command_line() -> None:
    dotted = load({"models.a.model": "embedded", "models.a.decoders": "2", "models.b.model": "x"})
    assert dotted.each["a"].decoders.replicas == 2
    assert list(load({"models": '{"a": {}, "b": {"decoders": 1}}'}).each) == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"models": {"a": {"aliases": ["x"]}, "b": {"aliases": ["x"]}}}, "'x' is a name of 'a'"),
        ({"models": {"a": {"aliases": ["b"]}, "b": {}}}, "models.a.aliases: 'b' is a name of 'b'"),
        ({"models": {"a": {"port": 1}}}, "models.a.port: all models have it in common"),
        ({"models": {"a": {"decoder": 1}}}, "models.a.decoder: no such setting of a model"),
        ({"models": {"a": {"decoders": 0}}}, "models.a.decoders: give at least 1"),
        ({"models": {"a b": {}}}, "models.a b: name models by letters"),
        ({"models": {"a.b": {}, "a-b": {}}}, "models.a-b: told from 'a.b' by punctuation alone"),
        ({"models": {"a": {}}, "model": "x"}, "model: with models, it is a model's own"),
        ({"models": {"a": {}, "b": {}}, "host": "0.0.0.0"}, "host: whoever reaches 0.0.0.0"),
        ({"models": {"a": {}}, "default_model": "z"}, "default_model: 'z' is not served; give a"),
    ],
)
def test_wrong_maps_are_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(given)
    (line,) = refused.value.problems
    assert said in line


def test_a_name_is_found_by_the_longest_alias() -> None:
    names = Names(two())
    asked = ("big", "gpt-5", "claude-opus-4", "claude-haiku-4-5", "small")
    assert [names.find(one) for one in asked] == ["big", "big", "big", "small", "small"]


@pytest.mark.parametrize("asked", [None, "llama"])
def test_another_name_is_refused_with_those_that_there_are(asked: str | None) -> None:
    with pytest.raises(ApiError, match=r"'big'.*'small'") as refused:
        Names(two()).find(asked)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert Names(two(default_model="small")).find(asked) == "small"


def test_a_limited_key_is_told_of_its_models_alone() -> None:
    names = Names(two())
    assert names.allowed(()) == ["big", "small"]
    assert names.find("claude-haiku-1", ["small"]) == "small"
    with pytest.raises(ApiError) as refused:
        names.find("big", ["small"])
    assert refused.value.status == 404
    assert "use 'small'" in refused.value.message


def test_a_single_model_has_aliases_and_a_default_too() -> None:
    names = Names(load({"aliases": ["gpt-*"]}))
    assert names.find(None) == names.find("gpt-9") == "conserve-embedded"
    with pytest.raises(ApiError):
        names.find("llama")
    assert Names(load({"default_model": "conserve-embedded"})).find("x") == "conserve-embedded"
