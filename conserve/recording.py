"""Keeps what is known of turns, but no text, for a recorder while one asks (`conserve record`)."""

import re
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any
from zlib import crc32

from conserve import identity
from conserve.turn import TurnKey, TurnStats
from conserve.why import cause_of

BLOCK_TOKENS, DIGEST_BYTES = 64, 8
# A recorder that has not asked for so long is gone. Engines and routers say what they know of a
# turn within the second time.
SILENCE_S, _LATE_S = 30.0, 5.0
# Bytes of turns that wait for a recorder, and that it gets at once.
_MOST_BYTES, _PAGE_BYTES, _TURN_BYTES = 64 * 2**20, 2**20, 512
_MOST_OPEN = 4096
# Models make up names of tools, and may put anything into them.
_NAME = re.compile(r"[\w.:/,-]*", re.ASCII)
# Fields of `TurnStats` that a recorder gets.
_TOLD = ("outcome", "prompt_tokens", "output_tokens", "decoder_cached_tokens", "lmcache_tokens",
         "remote_tokens", "ttft_s", "latency_s", "idle_s")  # fmt: skip


def block_digests(salt: bytes, ids: Sequence[int], images: Iterable[tuple[str, Any]]) -> bytes:
    """Return a digest for each whole block of a prompt: of it, and of all before it."""
    tokens = array("I", ids)
    for name, place in images:
        tokens[place.offset] = crc32(name.encode())
    digests = [b""]
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block = tokens[end - BLOCK_TOKENS : end].tobytes()
        digests.append(digest(salt, digests[-1] + block))
    return b"".join(digests)


def digest(salt: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES, key=salt).digest()


class Recording:
    """Turns that have ended since a recorder first asked. Times are of `unix_s`.

    A turn is kept once its router, its decoder and its prompt's digests have come, or are late.

    Attributes:
        dropped: turns by tenant that no recorder has asked for in time.
    """

    def __init__(self) -> None:
        self._salt, self._asked_s, self._newest, self._bytes = b"", 0.0, 0, 0
        self._open: dict[TurnKey, tuple[TurnStats, dict[str, Any]]] = {}
        # When the end of each was first heard of.
        self._ended_s: dict[TurnKey, float] = {}
        # Each with the microsecond that numbers it, its tenant and its size.
        self._kept: deque[tuple[int, str | None, int, dict[str, Any]]] = deque()
        self._tenants: dict[str, int] = {}
        self.dropped: Counter[str | None] = Counter()

    def salt(self, now_s: float) -> bytes:
        """Return the salt of digests; empty: nothing is recorded."""
        if self._salt and now_s - self._asked_s > SILENCE_S:
            vars(self).update(vars(Recording()))
        return self._salt

    def note(self, turn: TurnKey, now_s: float, said: TurnStats | None = None, **more: Any) -> None:
        """Note what is said of a turn: a part of its record, and what is no part of that."""
        if self.salt(now_s):
            stats, known = self._open.setdefault(turn, (TurnStats(), {}))
            if len(self._open) > _MOST_OPEN:
                # Digests that came after all else of their turn: nothing ends them.
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._ended_s.pop(oldest, None)
            known |= more
            if said is not None:
                stats.merge(said)
                self._ended_s.setdefault(turn, now_s)
            if stats.outcome and stats.began_s and "blocks" in known:
                self._keep(turn, now_s)

    def _keep(self, turn: TurnKey, now_s: float) -> None:
        stats, known = self._open.pop(turn)
        del self._ended_s[turn]
        conversation, parent = identity.conversation_of(turn.history_id), known.get("parent")
        tenant, tool = identity.tenant_of(conversation), stats.tool
        told = {"at": stats.began_s} | known | {name: getattr(stats, name) for name in _TOLD} | {
            "conversation": digest(self._salt, conversation.encode()),
            "history": identity.number_of(turn.history_id),
            "parent": None if parent is None else digest(self._salt, parent.encode()),
            "tenant": tenant and self._tenants.setdefault(tenant, len(self._tenants) + 1),
            "cause": cause_of(stats),
            "tool": tool if tool is None or _NAME.fullmatch(tool) else "?",
        }  # fmt: skip
        self._newest = max(self._newest + 1, int(now_s * 1e6))
        size = _TURN_BYTES + len(known.get("blocks", b""))
        self._kept.append((self._newest, tenant, size, told))
        self._bytes += size
        while self._bytes > _MOST_BYTES:
            _, of, size, _ = self._kept.popleft()
            self._bytes -= size
            self.dropped[of] += 1

    def after(
        self, number: int, now_s: float, tenant: str | None = None
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return a tenant's turns after a number (0: now), or all (None), and the last one's.

        The recording begins with the first call, and ends when none comes for a while.
        """
        self._salt, self._asked_s = self.salt(now_s) or secrets.token_bytes(32), now_s
        for turn in [one for one, at_s in self._ended_s.items() if now_s - at_s > _LATE_S]:
            if self._open[turn][0].outcome or self._open[turn][0].prompt_tokens:
                self._keep(turn, now_s)
            else:
                del self._open[turn], self._ended_s[turn]
        last, turns, left = number or int(now_s * 1e6), [], _PAGE_BYTES
        newer = [*takewhile(lambda one: one[0] > number > 0, reversed(self._kept))]
        for at, of, size, told in reversed(newer):
            if tenant in (None, of) and left > 0:
                last, left = at, left - size
                turns.append(told)
        return last, turns
