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
