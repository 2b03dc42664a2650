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


@pytest.mark.parametrize(
    ("settings", "scheduled"),
    [
        ({}, ()),
        ({"engine_scheduler": "conversation"}, ("decoder",)),
        ({"engine_scheduler": "conversation", "placement": "elastic"}, ("decoder", "prefiller")),
    ],
)
def test_engines_that_host_conversations_schedule_by_them_where_that_is_asked_for(
    settings: dict[str, Any], scheduled: tuple[str, ...]
) -> None:
    from deployments.app import llm_config

    chosen = Settings(**settings)
    for role, own in (("decoder", chosen.decoders), ("prefiller", chosen.prefillers)):
        arguments = llm_config(role, chosen, own, gpu=False).engine_kwargs  # type: ignore[arg-type]
        assert ("scheduler_cls" in arguments) == (role in scheduled)
        assert ("scheduling_policy" in arguments) == (role in scheduled)
