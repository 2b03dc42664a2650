"""The salt under which engines keep a prompt's KV."""

from typing import Any

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

from deployments.router import salt as salting


def salt_of(body: dict[str, Any]) -> Any:
    return salting.with_salt(body, None).get("cache_salt")


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
