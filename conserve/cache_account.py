"""Sums up which prompt tokens engines computed over the last hour, and why."""

from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from conserve import identity
from conserve.turn import TurnStats
from conserve.why import Cause, cause_of, where

MOST_MINUTES = 60
OTHERS, UNKNOWN = "others", "unknown"
# Sums by client that a minute keeps; those of further clients are counted as `OTHERS`.
_MOST_SUMS = 500
# Conversations and clients whose last turns are followed.
_MOST_STREAKS = 4096
# As many turns in a row that break at one place make a text that rotates.
_ROTATES = 3

NEW: tuple[Cause, ...] = ("first", "append")
"""Causes of tokens that no cache could have had; all others were computed again."""
_ASK = "Ask the client's author to"
# The name of each cause, and what to do in one line.
ABOUT: dict[Cause, tuple[str, str]] = {
    "first": ("first turn", "New text: nothing to do."),
    "append": ("append", "New text: nothing to do."),
    "rotating": ("rotating text", f"{_ASK} put what changes in each turn into the newest message."),
    "system": ("system text changed", f"{_ASK} keep the system text as it was first sent."),
    "tools": ("tool list changed", f"{_ASK} send the same tools and schemas, in the same order."),
    "message": ("earlier message changed", f"{_ASK} send earlier messages as they were."),
    "evicted": ("evicted while idle", "Set lmcache.size_gb higher, or add engines."),
    "paused": ("paused", "Set lmcache.size_gb higher, or lmcache.disk.path, or add engines."),
    "moved": ("moved", "Set lmcache.size_gb higher, so that moved histories are loaded."),
    "lost": ("engine lost", "See the log for why; what lmcache.size_gb has room for outlives it."),
    "unknown": ("history not known", "Have clients send an id; set idle_timeout_s higher."),
}


class Key(NamedTuple):
    """Tells the sums of a minute apart; the client is the product in its ``User-Agent``."""

    cause: Cause
    client: str
    tenant: str | None


class Spent(msgspec.Struct):
    """Turns for which prompt tokens were computed; the newest one is an example.

    Attributes:
        seconds: of their prefills, as far as engines measured them.
        joules: of these seconds, estimated; 0: not known.
        example, where: its conversation, scoped to its tenant, and where its prefix broke.
    """

    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    example: str = ""
    where: str | None = None

    def add(self, other: "Spent", sign: int = 1) -> None:
        self.turns += sign * other.turns
        self.tokens += sign * other.tokens
        self.seconds += sign * other.seconds
        self.joules += sign * other.joules
        if other.example and (sign > 0 or self.example == other.example):
            self.example, self.where = (other.example, other.where) if sign > 0 else ("", None)


class _Counted(msgspec.Struct):
    minute: int
    key: Key
    spent: Spent


class CacheAccount:
    """Keeps sums by minute, cause, client and tenant, of turns that have ended, and no text."""

    def __init__(self) -> None:
        self._minutes: dict[int, dict[Key, Spent]] = {}
        # By conversation, and by client: the place at which the last turns broke, and these turns.
        self._streaks: dict[Hashable, tuple[Hashable, list[_Counted]]] = {}

    def add(self, history_id: str, stats: TurnStats, now_s: float) -> None:
        """Count a turn that has ended, however it did; ``now_s`` is Unix time."""
        tokens = max(0, stats.computed_tokens - stats.output_tokens)
        if not tokens:
            return
        minute, cause = int(now_s // 60), cause_of(stats)
        self._minutes.setdefault(minute, {})
        for old in [one for one in self._minutes if one < minute - MOST_MINUTES]:
            del self._minutes[old]
        conversation_id = identity.conversation_of(history_id)
        key = Key(cause, stats.client or UNKNOWN, identity.tenant_of(history_id))
        broke = None if stats.broken is None else where(stats.broken)
        token_s = ((stats.engine_prefill_s or 0.0) + (stats.prefiller_s or 0.0)) / tokens
        token_j = stats.prefill_j / tokens
        gone = stats.had_tokens and cause in ("evicted", "paused", "moved", "lost")
        if gone and (new := stats.prompt_tokens - stats.had_tokens) > 0:
            appended = Spent(1, new, new * token_s, new * token_j, conversation_id)
            self._count(_Counted(minute, key._replace(cause="append"), appended))
            tokens -= new
        spent = Spent(1, tokens, tokens * token_s, tokens * token_j, conversation_id, broke)
        self._count(counted := _Counted(minute, key, spent))
        for whose in (conversation_id, stats.client and (key.tenant, stats.client)):
            if whose is not None and cause != "first":
                self._follow(whose, counted, stats)

    def spent(self, minutes: int, now_s: float, tenant: str | None = None) -> dict[Key, Spent]:
        """Return the sums of this minute and those before it; ``tenant``: None for all."""
        found: dict[Key, Spent] = {}
        for minute, sums in sorted(self._minutes.items()):
            if minute >= now_s // 60 - minutes:
                for key, spent in sums.items():
                    if tenant in (None, key.tenant):
                        found.setdefault(key, Spent()).add(spent)
        return found

    def _count(self, counted: _Counted) -> None:
        sums = self._minutes[counted.minute]
        if counted.key not in sums and len(sums) >= _MOST_SUMS:
            counted.key = counted.key._replace(client=OTHERS)
        sums.setdefault(counted.key, Spent()).add(counted.spent)

    def _follow(self, whose: Hashable, counted: _Counted, stats: TurnStats) -> None:
        """Note a later turn; all of a long enough streak are of text that rotates."""
        before = self._streaks.pop(whose, None)
        if stats.broken is None or counted.key.cause == "append":
            return
        place = stats.broken.place, stats.broken.messages
        turns = before[1] if before is not None and before[0] == place else []
        self._streaks[whose] = place, turns
        if len(self._streaks) > _MOST_STREAKS:
            del self._streaks[next(iter(self._streaks))]
        turns.append(counted)
        for one in turns if len(turns) >= _ROTATES else ():
            sums = self._minutes.get(one.minute, {})
            if one.key.cause != "rotating" and one.key in sums:
                sums[one.key].add(one.spent, -1)
                if not sums[one.key].turns:
                    del sums[one.key]
                one.key = one.key._replace(cause="rotating")
                self._count(one)
        del turns[:-_ROTATES]
