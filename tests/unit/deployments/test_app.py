"""Which engines store KV for others, and which only take it."""

from typing import Any

import pytest

from conserve.settings import Settings


@pytest.mark.parametrize(
    ("settings", "decoders"),
    [
        ({}, "kv_both"),
        ({"parking": False}, "kv_consumer"),
        ({"pausing": False}, "kv_consumer"),
        # There prefillers read what decoders have computed.
        ({"placement": "per_turn"}, "kv_both"),
    ],
)
def test_decoders_store_where_something_is_parked_or_read(
    settings: dict[str, Any], decoders: str
) -> None:
    from deployments.app import _kv_role

    chosen = Settings(**settings)
    assert (_kv_role("prefiller", chosen), _kv_role("decoder", chosen)) == ("kv_producer", decoders)


@pytest.mark.parametrize(("parking", "decoders"), [(True, "kv_both"), (False, "kv_consumer")])
def test_a_prefiller_that_hosts_stores_what_it_is_told_to(parking: bool, decoders: str) -> None:
    """Of its own conversations' prompts nobody else has any use."""
    from deployments.app import _kv_role

    chosen = Settings(placement="elastic", parking=parking)
    assert (_kv_role("prefiller", chosen), _kv_role("decoder", chosen)) == ("kv_both", decoders)
