"""Conversations and engines as clients see them: ``GET /v1/conversations``, ``/v1/engines``."""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

from conserve import identity
from conserve.conversations import ConversationTable
from conserve.events import Event
from conserve.histories.sharing import held_together
from conserve.history import History
from conserve.pausing import RunningTools
from conserve.pausing.tools import Running
from conserve.placement.load import EngineLoad
from deployments.messages import EngineInfo
from deployments.table.listening import own_view

# Of a conversation's, so many are shown: a name that many share may have thousands.
SHOWN_HISTORIES = 64


def conversation_view(
    histories: Sequence[History],
    now_s: float,
    tools: RunningTools,
    events: Sequence[Event] | None = None,
) -> dict[str, Any]:
    """One live conversation, as JSON, with its tenant where there are keys.

    Args:
        histories: its histories, at least one. What is of one alone (the decoder, the last turn) is
            that of the most recently used.
        now_s: Unix time.
        tools: which run, as clients report it.
        events: what has happened to it; None: that is not shown.
    """
    newest = max(histories, key=lambda one: one.last_used_s)
    ttfet_s = next((one.ttfet_s for one in histories if one.ttfet_s is not None), None)
    first = min(histories, key=lambda one: one.created_s)
    tenant = identity.tenant_of(newest.id)
    energy_j = sum(one.energy_j for one in histories)
    return {
        "id": identity.own_id(newest.id),
        "object": "conversation",
        **({} if tenant is None else {"tenant": tenant}),
        "phase": _phase(histories),
        "turns": sum(one.turns for one in histories),
        "held_tokens": held_together(histories),
        "decoder": newest.decoder_id,
        "moves": sum(one.moves for one in histories),
        "ttfet_s": None if ttfet_s is None else round(ttfet_s, 4),
        "created": int(first.created_s),
        "age_s": round(max(0.0, now_s - first.created_s), 3),
        "last_used": int(newest.last_used_s),
        "idle_s": round(max(0.0, now_s - newest.last_used_s), 3),
        "last_turn": _turn_view(newest),
        "energy_estimate_j": round(energy_j, 3) if energy_j else None,
        "running_tools": sum(len(tools.running(one.id)) for one in histories),
        "histories": [_history_view(one, now_s, tools) for one in _recent(histories)],
        "histories_total": len(histories),
        **({} if events is None else {"events": [own_view(one) for one in events]}),
    }


def _phase(histories: Sequence[History]) -> str:
    """`reasoning` while any turn runs, `paused` while none is on a decoder, else `acting`."""
    if any(one.running for one in histories):
        return "reasoning"
    return "paused" if all(one.decoder_id is None for one in histories) else "acting"


def _recent(histories: Sequence[History]) -> Sequence[History]:
    if len(histories) <= SHOWN_HISTORIES:
        return histories
    return heapq.nlargest(SHOWN_HISTORIES, histories, key=lambda one: one.last_used_s)


def _history_view(history: History, now_s: float, tools: RunningTools) -> dict[str, Any]:
    return {
        "phase": _phase([history]),
        "turns": history.turns,
        "held_tokens": history.held_tokens,
        # Of those, what it begins with as others on its decoder do.
        "shared_tokens": 0 if history.base is None else history.base.tokens,
        "decoder": history.decoder_id,
        "moves": history.moves,
        "age_s": round(max(0.0, now_s - history.created_s), 3),
        "idle_s": round(max(0.0, now_s - history.last_used_s), 3),
        "last_turn": _turn_view(history),
        "hints": _hints_view(history),
        # What its last answer called: empty for nothing, null where that is not known.
        "called": history.tool,
        "running_tools": [_tool_view(one, now_s) for one in tools.running(history.id)],
    }


def _tool_view(one: Running, now_s: float) -> dict[str, Any]:
    running_s = round(max(0.0, now_s - one.started_s), 3)
    call_id = {} if one.call_id is None else {"call_id": one.call_id}
    return {"tool": one.tool, **call_id, "running_s": running_s}


def _hints_view(history: History) -> dict[str, Any]:
    if history.hints is None:
        return {}
    said = dataclasses.asdict(history.hints)
    return {name: value for name, value in said.items() if value is not None}


def _turn_view(history: History) -> dict[str, int] | None:
    last = history.last_turn
    if last is None:
        return None
    return {
        "prompt_tokens": last.prompt_tokens,
        "output_tokens": last.output_tokens,
        "decoder_cached_tokens": last.decoder_cached_tokens,
        "lmcache_tokens": last.lmcache_tokens,
    }


def engine_view(
    engine: EngineInfo, table: ConversationTable, load: EngineLoad | None
) -> dict[str, Any]:
    """One engine, what it holds and what it does, as JSON.

    Args:
        load: as it has told it last; None before its first beat.
    """
    decoder = table.decoders.get(engine.id)
    prefiller = table.prefillers.get(engine.id)
    return {
        "id": engine.id,
        "role": engine.role,
        "hosts": engine.hosts,
        "url": engine.url,
        "pid": engine.pid,
        "leaving": table.is_leaving(engine.id),
        "capacity_tokens": engine.capacity_tokens,
        "max_model_len": engine.max_model_len,
        "max_batched_tokens": engine.max_batched_tokens,
        "held_tokens": decoder.held_tokens if decoder else None,
        "conversations": decoder.conversations if decoder else None,
        "queued_tokens": prefiller.queued_tokens if prefiller else None,
        "load": None if load is None else _load_view(load),
        # What it costs to hand over prompts of so many tokens, as tried at its start.
        "handoff_s": {str(tokens): round(cost_s, 4) for tokens, cost_s in engine.handoffs},
        "tier": engine.tier,
        "gpus": list(engine.gpus),
        **({"sm_slots": engine.sm_slots, "sms": engine.sms} if engine.sm_slots else {}),
    }


def _load_view(load: EngineLoad) -> dict[str, int | float | None]:
    return {
        "prefill_tokens": load.prefill_tokens,
        "decodes": load.decodes,
        # 0 stands for what is not known.
        "step_s": round(load.step_s, 6) or None,
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1) or None,
    }
