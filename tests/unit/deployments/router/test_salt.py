"""The salt under which engines keep a prompt's KV."""

from typing import Any

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from deployments.router import salt as salting


def salt_of(body: dict[str, Any]) -> Any:
    return salting.with_salt(body, None).get("cache_salt")


def own_media(messages: Any, salt: str) -> Any:
    return salting.own_media({"messages": messages}, salt)["messages"]


@pytest.mark.parametrize("salt", ["mine", "x" * 128, "a b:c"])
def test_without_keys_a_clients_salt_stays(salt: str) -> None:
    assert salt_of({"cache_salt": salt}) == salt
    assert salt_of({}) is None


@pytest.mark.parametrize("salt", ["a/b", "a@b", "a\\b", "a\0b", "x" * 129, "@\ud800"])
def test_one_that_would_end_an_engine_is_hashed(salt: str) -> None:
    """LMCache's key refuses it, in vLLM's scheduler."""
    with pytest.raises(ValueError, match="cache_salt"):
        IPCCacheServerKey("m", 1, None, (), 0, 0, "r", salt)
    IPCCacheServerKey("m", 1, None, (), 0, 0, "r", salt_of({"cache_salt": salt}))
    assert salt_of({"cache_salt": salt}) != salt_of({"cache_salt": salt + "x"})


@pytest.mark.parametrize("salt", [5, None, "", ["@"]])
def test_what_is_no_salt_is_for_the_engine_to_refuse(salt: Any) -> None:
    assert salt_of({"cache_salt": salt}) == salt


def test_tenants_media_have_names_of_their_own() -> None:
    image = {"type": "image_url", "image_url": None, "uuid": "cat"}
    text = {"type": "text", "text": "what is it?"}
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": [text, image]}]
    names = {}
    for salt in ("a", "b"):
        own = own_media(messages, salt)
        assert own[0] is messages[0]
        assert own[1]["content"][0] is text
        assert {**own[1]["content"][1], "uuid": "cat"} == image
        names[salt] = own[1]["content"][1]["uuid"]
        assert own_media(messages, salt) == own
    assert len({"cat", *names.values()}) == 3


def test_what_a_tool_has_put_out_and_what_it_was_told_have_too() -> None:
    image = {"type": "input_image", "image_url": "data:,", "uuid": "cat"}
    items = [
        {"type": "function_call_output", "call_id": "c", "output": [image]},
        {"role": "user", "content": [{"type": "tool_result", "content": [image]}]},
    ]
    own = salting.own_media({"input": items}, "a")["input"]
    names = {own[0]["output"][0]["uuid"], own[1]["content"][0]["content"][0]["uuid"]}
    assert len(names) == 1
    assert "cat" not in names


def test_a_name_that_was_given_stays_and_no_other_tenants_passes_for_one() -> None:
    """A history comes back from a decoder as that one got it."""
    messages = [{"role": "user", "content": [{"type": "image_url", "uuid": "cat"}]}]
    own = own_media(messages, "a")
    assert own_media(own, "a") is not messages
    assert own_media(own, "a") == own
    assert own_media(own, "b") != own
    forged = own[0]["content"][0]["uuid"].partition("-")[2]
    for name in (f"x-{forged}", f"{forged}-{forged}", forged):
        part = {"type": "image_url", "uuid": name}
        assert own_media([{"role": "user", "content": [part]}], "a")[0]["content"][0] != part


def test_messages_without_named_media_are_not_copied() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": None}, "y"]}, 5]
    assert own_media(messages, "a") is messages
    assert own_media("junk", "a") == "junk"
    body = {"messages": messages}
    assert salting.own_media(body, "a") is body
