"""Several models behind one door: their settings, and their names."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from conserve.adapters import Adapter, AdapterFile, adapter_in
from conserve.embedded import model_path
from conserve.errors import ApiError
from conserve.models import Names
from conserve.settings import Settings, SettingsError, load
from conserve.tenants import keyfile
from tests.adapter_files import make_adapter

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
        (
            {"models": {"a": {"aliases": ["x"]}, "b": {"aliases": ["x"]}}},
            "'x' belongs to 'a' already",
        ),
        ({"models": {"a": {"aliases": ["b"]}, "b": {}}}, "models.a.aliases: 'b' belongs to 'b'"),
        ({"models": {"a": {"adapters": {"b": "/x"}}, "b": {}}}, "models.a.adapters: 'b'"),
        (
            {"models": {"a": {"adapters_file": "/f"}, "b": {"adapters_file": "/f"}}},
            "models.b.adapters_file: '/f' belongs to 'a' already",
        ),
        ({"models": {"a": {}}, "adapters_file": "/f"}, "adapters_file: with models, it is a"),
        ({"aliases": ["x"], "adapters": {"x": "/x"}}, "adapters: 'x' is a name of the model"),
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
    names = Names(two(), 0.0)
    asked = ("big", "gpt-5", "claude-opus-4", "claude-haiku-4-5", "small")
    assert [names.find(one, (), 0.0)[0] for one in asked] == ["big", "big", "big", "small", "small"]


@pytest.mark.parametrize("asked", [None, "llama"])
def test_another_name_is_refused_with_those_that_there_are(asked: str | None) -> None:
    with pytest.raises(ApiError, match=r"'big'.*'small'") as refused:
        Names(two(), 0.0).find(asked, (), 0.0)[0]
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert Names(two(default_model="small"), 0.0).find(asked, (), 0.0)[0] == "small"


def test_a_limited_key_is_told_of_its_models_alone() -> None:
    names = Names(two(), 0.0)
    assert names.allowed((), 0.0) == ["big", "small"]
    assert names.find("claude-haiku-1", ["small"], 0.0)[0] == "small"
    with pytest.raises(ApiError) as refused:
        names.find("big", ["small"], 0.0)[0]
    assert refused.value.status == 404
    assert "use 'small'" in refused.value.message


def test_a_single_model_has_aliases_and_a_default_too() -> None:
    names = Names(load({"aliases": ["gpt-*"]}), 0.0)
    assert names.find(None, (), 0.0)[0] == names.find("gpt-9", (), 0.0)[0] == "conserve-embedded"
    with pytest.raises(ApiError):
        names.find("llama", (), 0.0)[0]
    names = Names(load({"default_model": "conserve-embedded"}), 0.0)
    assert names.find("x", (), 0.0)[0] == "conserve-embedded"


def test_an_adapter_is_found_after_exact_names_and_before_those_that_begin_so(
    tmp_path: Path,
) -> None:
    made = {name: str(make_adapter(tmp_path / name, model_path(), ord(name))) for name in "ab"}
    models = {
        "big": {"model": "embedded", "aliases": ["team-*"], "adapters": {"team-a": made["a"]}},
        "small": {"model": "embedded", "aliases": ["x"], "adapters_file": str(tmp_path / "file")},
    }
    names = Names(load({"models": models}), 0.0)
    a = adapter_in("team-a", made["a"])
    assert names.find("team-a", (), 0.0) == ("big", a)
    assert names.find("team-b", (), 0.0) == ("big", None)
    b = adapter_in("team-b", made["b"])
    hidden = Adapter("x", made["b"], b.digest)
    keyfile.write(tmp_path / "file", AdapterFile(1, [b, hidden]))
    assert names.find("team-b", (), 2.0) == ("small", b)
    assert names.find("x", (), 2.0) == ("small", None)
    assert names.allowed((), 2.0) == ["big", "small", "team-a", "team-b"]
    # A key for a model is not one for its adapters, nor the other way round.
    assert names.allowed(["big", "team-b"], 2.0) == ["big", "team-b"]
    for key, asked in (("big", "team-a"), ("team-b", "small")):
        with pytest.raises(ApiError, match="not served here"):
            names.find(asked, [key], 2.0)
