"""Says in a sentence why a turn was slow, from what was recorded of it and from nothing else."""

from dataclasses import dataclass
from typing import Literal

from conserve.history import TurnStats

# Shorter times, and fewer tokens, slow no turn down that anybody would ask about. A template may
# change as many tokens where an answer ends.
_LEAST_S = 0.5
_LEAST_TOKENS = 64

Unbound = Literal["paused", "moved", "lost", "left"]
"""A history was bound nowhere: paused, or moved off an engine that has it, or that is gone."""
Place = Literal["system", "first_prompt", "messages"]


@dataclass(frozen=True, slots=True)
class Broken:
    """A turn that follows earlier answers begins a history: its prefix is that of no other.

    Attributes:
        place: where it differs: in its tools or system messages (``system``), elsewhere before the
            first answer (``first_prompt``), or behind that (``messages``).
        messages: how many it has in common with the history that is most like it, up to an answer;
            0: only the first prompt.
        exact: whether no further answer is in common. A long history forgets some answers.
    """

    place: Place
    messages: int = 0
    exact: bool = True


@dataclass(slots=True)
class TurnFacts:
    """Facts of one turn but for its engine's report, noted as they become known.

    Attributes:
        began_s: when it was bound or begun.
        idle_s: how long its history was idle before; None: it was new, or another turn ran.
        had_tokens: of the history, after its turn before.
        unbound: why its history was bound nowhere; None: it was bound, or new.
        room_s, room_why: how long it waited for room, and why; see `conserve.admission.Why`.
        prefill_s: from its beginning to the end of its remote prefill; None: it has none.
        prefill_tokens: those that the prefiller computed; None: it failed.
    """

    began_s: float
    idle_s: float | None = None
    had_tokens: int = 0
    unbound: Unbound | None = None
    broken: Broken | None = None
    room_s: float = 0.0
    room_why: str = "room"
    prefill_s: float | None = None
    prefill_tokens: int | None = None


_ROOM = {
    "room": "waited {} for room",
    "window": "waited {} because as many conversations were active as the window admits",
    "order": "waited {} because others went first",
}
_ENGINE = {
    "room": "waited {} for room in its engine",
    "place": "waited {} for a place among the calls of its engine",
    "step": "waited {} for other calls of its engine",
    "load": "waited {} for its KV to be loaded",
}


def why_slow(facts: TurnFacts, stats: TurnStats) -> str | None:
    """Return the reasons for a turn's wait before its first token; None: there are none known."""
    reasons: list[str | None] = [_lost(facts, stats)]
    if facts.room_s >= _LEAST_S:
        reasons.append(_ROOM[facts.room_why].format(_seconds(facts.room_s)))
    if stats.encode_wait_s >= _LEAST_S:
        reasons.append(f"waited {_seconds(stats.encode_wait_s)} for its images")
    if stats.encode_s >= _LEAST_S:
        images = (
            "a new image" if stats.encoded_images == 1 else f"{stats.encoded_images} new images"
        )
        reasons.append(f"encoded {images} ({_seconds(stats.encode_s)})")
    if facts.prefill_s is not None and facts.prefill_s >= _LEAST_S:
        failed = facts.prefill_tokens is None
        reasons.append(
            f"waited {_seconds(facts.prefill_s)} for a prefill"
            + (" that failed, so its decoder computed the prompt" if failed else "")
        )
    if stats.missed_tokens >= _LEAST_TOKENS:
        reasons.append(
            f"its decoder did not find {stats.missed_tokens:,} prefilled tokens, and computed them"
        )
    if stats.engine_wait_s is not None and stats.engine_wait_s >= _LEAST_S:
        waited = _ENGINE.get(stats.engine_wait_for or "", "waited {} in its engine")
        reasons.append(waited.format(_seconds(stats.engine_wait_s)))
    if stats.prefill_s >= _LEAST_S:
        reasons.append(f"its prompt took {_seconds(stats.prefill_s)} in the prefill lane")
    return "; ".join(one for one in reasons if one) or None


def _lost(facts: TurnFacts, stats: TurnStats) -> str | None:
    """Say why KV that might have been there was computed (again)."""
    # The decoder computes again what is behind a prefill's last chunk.
    computed_tokens = max(stats.prompt_tokens - stats.found_tokens, facts.prefill_tokens or 0)
    if computed_tokens < _LEAST_TOKENS:
        return None
    computed = f"{computed_tokens:,} tokens computed"
    if facts.broken is not None:
        return f"prefix broken {_where(facts.broken)} ({computed})"
    # If more than half is there, a template may have dropped the reasoning of earlier answers.
    had_tokens = min(facts.had_tokens, stats.prompt_tokens)
    if 2 * (stats.prompt_tokens - computed_tokens) >= had_tokens:
        return None
    if facts.unbound in ("lost", "left"):
        engine = "was lost" if facts.unbound == "lost" else "has left"
        return f"its engine {engine}: prefilled again ({computed})"
    if facts.unbound == "moved":
        return f"moved off a busier engine: prefilled again ({computed})"
    paused = "paused to make room, and " if facts.unbound == "paused" else ""
    if facts.idle_s is None:
        return f"{paused}evicted ({computed})"
    return f"{paused}evicted while idle for {_seconds(facts.idle_s)} ({computed})"


def _where(broken: Broken) -> str:
    if broken.place == "system":
        return "at its beginning: the client changed its system prompt or its tools"
    if broken.place == "first_prompt":
        return "before its first answer: the client changed its first prompt, or what precedes it"
    after = f"message {broken.messages}" if broken.messages else "its first prompt"
    later = "" if broken.exact else " or later"
    return f"after {after}{later}: the client changed what follows"


def _seconds(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s < 10 else f"{time_s:.0f} s"
