"""Commands to the scheduler, from the process that has the engine's client.

vLLM resolves a utility call by the name of an attribute of its ``EngineCore`` and runs it in that
one's own thread, between two steps: so within half a millisecond in an idle engine, and a step in a
busy one. A command that fails raises at its caller, and the engine goes on.
"""

from typing import Any

from conserve.engine_scheduling import KINDS
from deployments.engine.scheduler.counts import by_level

_UTILITY = "conserve_command"


def offer_commands() -> None:
    """Have this process's ``EngineCore`` obey commands."""
    from vllm.v1.engine.core import EngineCore

    def command(core: Any, name: str, given: dict[str, Any]) -> Any:
        return core.scheduler.conserve(name, given)

    setattr(EngineCore, _UTILITY, command)


async def command(client: Any, name: str, **given: Any) -> Any:
    """Have an ``AsyncLLM``'s scheduler obey a command.

    Raises:
        Exception: of vLLM's: it has failed there, or the engine is dead.
    """
    return await client.engine_core.call_utility_async(_UTILITY, name, given)


def obey(scheduler: Any, name: str, given: dict[str, Any]) -> Any:
    """Do what a command says.

    - ``pin(for_s)``: keep idle histories for so long each, by key; returns how many blocks.
    - ``release(keys, to)``: let histories go (`Histories.release`); returns how many blocks.
    - ``cached(keys)``: how many tokens of each history's last turn the cache has now; of all where
      ``keys`` is None.
    - ``observe()``: what is with the scheduler, and what it has done.

    Raises:
        ValueError: there is no such command.
    """
    histories, now_s = scheduler.histories, scheduler.clock()
    if name == "pin":
        return sum(histories.pin(key, ttl_s, now_s) for key, ttl_s in given["for_s"].items())
    if name == "release":
        return sum(histories.release(key, given["to"]) for key in given["keys"])
    if name == "cached":
        keys = histories.keys() if given["keys"] is None else given["keys"]
        return {key: histories.cached_tokens(key) for key in keys}
    if name == "observe":
        return _observed(scheduler, now_s)
    raise ValueError(f"the scheduler knows no command {name!r}")


def _observed(scheduler: Any, now_s: float) -> dict[str, Any]:
    levels, pool = scheduler.queue.levels, scheduler.kv_cache_manager.block_pool
    waiting = [*scheduler.waiting._heap, *scheduler.skipped_waiting._heap]
    running, counts = scheduler.running, scheduler.counts
    kinds = dict.fromkeys(KINDS, 0)
    for request in running:
        turn = scheduler.turns[request.request_id]
        kinds[turn.kind if request.is_prefill_chunk else "decode"] += 1
    return {
        "waiting": by_level((scheduler.level(one, now_s) for one in waiting), levels),
        "running": by_level((scheduler.level(one, now_s) for one in running), levels),
        "running_kinds": kinds,
        "begun": dict(counts.begun),
        "cut": dict(counts.cut),
        "parts": counts.parts,
        "preempted": list(counts.preempted),
        "reclaimed_blocks": scheduler.histories.reclaimed_blocks,
        "pinned_blocks": scheduler.histories.kept_blocks,
        "free_blocks": pool.get_num_free_blocks(),
        "blocks": pool.num_gpu_blocks - 1,
        "tpot_s": scheduler.chunks.tpot_s,
        "tpot_bound_s": scheduler.chunks.late_s,
        "budget_tokens": scheduler.chunks.allowed_tokens(),
        **({} if scheduler.lane is None else scheduler.lane.observed()),
    }
