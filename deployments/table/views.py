"""Conversations and engines as clients see them: ``GET /v1/conversations``, ``/v1/engines``."""

from typing import Any

import msgspec

from conserve import identity
from conserve.conversation import Conversation
from conserve.conversations import ConversationTable
from deployments.messages import EngineInfo


def conversation_view(conversation: Conversation, now_s: float) -> dict[str, Any]:
    """One live conversation, as JSON, with its tenant where there are keys.

    Args:
        now_s: Unix time.
    """
    last = conversation.last_turn
    tenant = identity.tenant_of(conversation.id)
    return {
        "id": identity.own_id(conversation.id),
        "object": "conversation",
        **({} if tenant is None else {"tenant": tenant}),
        "phase": conversation.phase,
        "turns": conversation.turns,
        "held_tokens": conversation.held_tokens,
        "decoder": conversation.decoder_id,
        "moves": conversation.moves,
        "ttfet_s": None if conversation.ttfet_s is None else round(conversation.ttfet_s, 4),
        "created": int(conversation.created_s),
        "age_s": round(max(0.0, now_s - conversation.created_s), 3),
        "last_used": int(conversation.last_used_s),
        "idle_s": round(max(0.0, now_s - conversation.last_used_s), 3),
        "last_turn": None if last is None else msgspec.structs.asdict(last),
        "energy_estimate_j": round(conversation.energy_j, 3) if conversation.energy_j else None,
    }


def engine_view(engine: EngineInfo, table: ConversationTable) -> dict[str, Any]:
    """One engine and what it holds, as JSON."""
    decoder = table.decoders.get(engine.id)
    prefiller = table.prefillers.get(engine.id)
    return {
        "id": engine.id,
        "role": engine.role,
        "url": engine.url,
        "pid": engine.pid,
        "leaving": table.is_leaving(engine.id),
        "capacity_tokens": engine.capacity_tokens,
        "max_batched_tokens": engine.max_batched_tokens,
        "held_tokens": decoder.held_tokens if decoder else None,
        "conversations": decoder.conversations if decoder else None,
        "queued_tokens": prefiller.queued_tokens if prefiller else None,
        "tier": engine.tier,
        "gpus": list(engine.gpus),
    }
