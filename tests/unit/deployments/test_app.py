"""Which engines store KV for others, and which only take it; and LMCache's chunks."""

from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load


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
    ("given", "gpu", "chunk"),
    [
        ({}, True, 256),
        ({}, False, 128),
        # Blocks that an operator asks for: a model with Mamba layers has large ones.
        ({"engine.block_size": 544}, True, 544),
        ({"engine.block_size": 96}, True, 288),
        ({"decoders.engine.block_size": 64, "prefillers.engine.block_size": 96}, True, 384),
        ({"engine.block_size": 544, "lmcache.chunk_tokens": 1088}, True, 1088),
    ],
)
def test_a_chunk_is_a_whole_number_of_every_engines_blocks(
    given: dict[str, Any], gpu: bool, chunk: int
) -> None:
    from deployments.app import _for_device, llm_config

    settings = _for_device(load(given), gpu)
    assert settings.lmcache.chunk_tokens == chunk
    # Engines are told, to say what to set where their blocks turn out to be others.
    engine = llm_config("decoder", settings, settings.decoders, gpu).engine_kwargs
    extra = engine["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["conserve.chunk_tokens"] == chunk


@pytest.mark.parametrize(
    ("given", "gpu", "why"),
    [
        ({"lmcache.chunk_tokens": 200}, False, r"200 is not a multiple of 128 \(CPU blocks\)"),
        (
            {"lmcache.chunk_tokens": 256, "engine.block_size": 544},
            True,
            r"256 is not a multiple of 544 \(engine.block_size\)",
        ),
    ],
)
def test_a_chunk_of_broken_blocks_is_refused(given: dict[str, Any], gpu: bool, why: str) -> None:
    from deployments.app import _for_device

    with pytest.raises(SettingsError, match=why):
        _for_device(load(given), gpu)
