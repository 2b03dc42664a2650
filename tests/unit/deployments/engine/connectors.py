"""Both halves of the LMCache connector without an engine, on adapters that a test brings."""

from types import SimpleNamespace
from typing import Any

from deployments.engine.lmcache_connector import ResilientMPConnector
from deployments.upstream.lost_server import Connection


def scheduler_half(
    adapter: Any, *, block_tokens: int = 128, give_up: tuple[int, ...] = (), **members: Any
) -> Any:
    """Return the half in vLLM's scheduler, which stores nothing unless ``members`` say so."""
    connector = _half(
        scheduler_adapter=adapter,
        request_trackers={},
        _save_decode_cache=False,
        _reserve_last_token_for_lookup=False,
        _hit_alignment_tokens=block_tokens,
        _group_tokens_per_block=[block_tokens],
        _dcp_size=1,
        _mamba_relocation_window=0,
        _eager_prefetch=False,
        _kv_cache_events=[],
        _connector_stats=SimpleNamespace(
            record_lookup=lambda took_s: None,
            clone_and_reset=lambda: SimpleNamespace(is_empty=lambda: True, data={}),
        ),
    )
    vars(connector).update(members)
    connector._prepare_scheduler(1, give_up)
    return connector


def worker_half(
    adapter: Any, connection: Connection | None = None, *, reports: bool = False, **members: Any
) -> Any:
    """Return the half in a worker, which stores."""
    connector = _half(worker_adapter=adapter, _connector_metadata=None)
    vars(connector).update(_can_store=True, **members)
    connector._prepare_worker(connection or Connection(), reports=reports)
    return connector


def _half(**members: Any) -> Any:
    connector = object.__new__(ResilientMPConnector)
    connector.lazy_offload = connector._can_store = False
    connector.dispatcher = None
    vars(connector).update(members)
    return connector
