"""Says in a sentence why a turn was slow, from what was recorded of it and from nothing else."""

from conserve.turn import Broken, TurnStats

# Shorter times, and fewer tokens, slow no turn down that anybody would ask about. A template may
# change as many tokens where an answer ends.
_LEAST_S = 0.5
_LEAST_TOKENS = 64

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
_GONE = {
    "lost": "its engine was lost",
    "left": "its engine has left",
    "unknown": "its earlier turns are not known here",
}


def why_slow(stats: TurnStats) -> str | None:
    """Return the reasons for a turn's wait before its first token; None: there are none known."""
    reasons: list[str | None] = [_lost(stats)]
    if stats.room_s >= _LEAST_S:
        reasons.append(_ROOM[stats.room_why].format(_seconds(stats.room_s)))
    if stats.beginning_s >= _LEAST_S:
        waited = _seconds(stats.beginning_s)
        reasons.append(f"waited {waited} for its beginning, which another prompt has too")
    if stats.encode_wait_s >= _LEAST_S:
        reasons.append(f"waited {_seconds(stats.encode_wait_s)} for its images")
    if stats.encode_s >= _LEAST_S:
        count = stats.encoded_images
        images = "a new image" if count == 1 else f"{count} new images"
        reasons.append(f"encoded {images} ({_seconds(stats.encode_s)})")
    if stats.remote_prefill_s is not None and stats.remote_prefill_s >= _LEAST_S:
        failed = " that failed, so its decoder computed the prompt" if stats.prefill_failed else ""
        reasons.append(f"waited {_seconds(stats.remote_prefill_s)} for a prefill{failed}")
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


def noted(stats: TurnStats) -> str | None:
    """Return what else is known of how a turn came, which made it no slower; None: nothing."""
    notes = ["rejoined after the connection was lost"] if stats.rejoined else []
    if stats.ahead_s is not None:
        notes.append(f"brought back {_seconds(stats.ahead_s)} before the turn")
    return "; ".join(notes) or None


def _lost(stats: TurnStats) -> str | None:
    """Say why KV that might have been there was computed (again)."""
    # The decoder computes again what is behind a prefill's last chunk.
    computed_tokens = max(stats.prompt_tokens - stats.found_tokens, stats.remote_tokens)
    gone, read_tokens = _GONE.get(stats.unbound or ""), stats.lmcache_tokens - stats.remote_tokens
    if gone and 2 * read_tokens >= stats.prompt_tokens > 0:
        return f"{gone}: {read_tokens:,} tokens read from host memory or a disk"
    if computed_tokens < _LEAST_TOKENS:
        return None
    computed = f"{computed_tokens:,} tokens computed"
    if stats.broken is not None:
        return f"prefix broken {_where(stats.broken)} ({computed})"
    # If more than half is there, a template may have dropped the reasoning of earlier answers.
    had_tokens = stats.prompt_tokens
    if stats.unbound != "unknown":
        had_tokens = min(had_tokens, stats.had_tokens)
    if 2 * (stats.prompt_tokens - computed_tokens) >= had_tokens:
        return None
    if gone:
        return f"{gone}: prefilled again ({computed})"
    if stats.unbound == "moved":
        return f"moved off a busier engine: prefilled again ({computed})"
    paused = "paused to make room, and " if stats.unbound == "paused" else ""
    idle = "" if stats.idle_s is None else f" while idle for {_seconds(stats.idle_s)}"
    return f"{paused}evicted{idle} ({computed})"


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
