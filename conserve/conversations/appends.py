"""Decides where later turns are prefilled."""

from conserve.conversations.engines import Engines
from conserve.history import History
from conserve.pausing import Memory
from conserve.placement import Appended, PlacementPolicy


class Appends:
    """Asks the policy where what turns append is prefilled, and keeps account of it there.

    Args:
        memory: who is parked; None without pausing.
    """

    def __init__(self, policy: PlacementPolicy, engines: Engines, memory: Memory | None) -> None:
        self._policy = policy
        self._engines = engines
        self._loads = engines.loads
        self._memory = memory

    def prefill(self, history: History, prompt_tokens: int | None, now_s: float) -> str | None:
        """See `ConversationTable.prefill_later_turn`."""
        appended = None
        if prompt_tokens is not None and history.decoder_id is not None:
            appended = Appended(
                history.decoder_id,
                prompt_tokens,
                min(history.held_tokens, prompt_tokens - 1),
                0 if self._memory is None else self._memory.parked_of(history),
            )
        pool = self._engines.accepting_prefillers
        prefiller_id = self._policy.prefill_later_turn(pool, appended, now_s)
        queued_tokens = history.held_tokens
        if appended is not None:
            cached_tokens = appended.held_tokens
            if prefiller_id is not None:
                cached_tokens = min(appended.parked_tokens, cached_tokens)
            queued_tokens = appended.tokens - cached_tokens
            if self._loads is not None:
                self._loads.appended(
                    history.id,
                    queued_tokens,
                    cached_tokens,
                    prefiller_id or appended.decoder_id,
                    now_s,
                    lent=prefiller_id is not None,
                )
        if prefiller_id is not None:
            self._engines.leave_queue(history)
            self._engines.join_queue(history, prefiller_id, queued_tokens)
        return prefiller_id
