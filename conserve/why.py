"""Says why a turn computed its prompt, and was slow, from what was recorded of it alone."""

from typing import Literal

from conserve.turn import Broken, TurnStats

Cause = Literal[
    "first", "append", "rotating", "system", "tools", "message", "evicted", "paused", "moved",
    "lost", "unknown",
]  # fmt: skip
"""Why a prompt's tokens were computed: its history is new (``first``), or was found (``append``);
the client changed what it had sent before, in turn after turn at one place if it is ``rotating``;
or KV is gone: of an idle history, with an engine (``lost``), or of one that is not known."""

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
_CHANGED = {
    "tools": "its tools", "system": "its system prompt", "messages": "what follows",
    "first_prompt": "its first prompt, or what precedes it",
}  # fmt: skip
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


def cause_of(stats: TurnStats) -> Cause:
    """Return why a turn's prompt was computed, as far as this turn alone tells."""
    computed_tokens = _computed_tokens(stats)
    if computed_tokens >= _LEAST_TOKENS:
        if stats.broken is not None:
            place = stats.broken.place
            return "message" if place == "first_prompt" or place == "messages" else place
        # If more than half is there, a template may have dropped the reasoning of earlier answers.
        said_tokens = stats.prompt_tokens if stats.unbound == "unknown" else stats.had_tokens
        had_tokens = min(stats.prompt_tokens, said_tokens)
        if 2 * (stats.prompt_tokens - computed_tokens) < had_tokens:
            return "lost" if stats.unbound == "left" else stats.unbound or "evicted"
    return "append" if stats.had_tokens or stats.unbound or stats.broken else "first"


def _computed_tokens(stats: TurnStats) -> int:
    # The decoder computes again what is behind a prefill's last chunk.
    return max(stats.prompt_tokens - stats.found_tokens, stats.remote_tokens)


def _lost(stats: TurnStats) -> str | None:
    """Say why KV that might have been there was computed (again)."""
    gone, read_tokens = _GONE.get(stats.unbound or ""), stats.lmcache_tokens - stats.remote_tokens
    if gone and 2 * read_tokens >= stats.prompt_tokens > 0:
        return f"{gone}: {read_tokens:,} tokens read from host memory or a disk"
    if (cause := cause_of(stats)) in ("first", "append"):
        return None
    computed = f"{_computed_tokens(stats):,} tokens computed"
    if stats.broken is not None:
        changed = f"the client changed {_CHANGED[stats.broken.place]}"
        return f"prefix broken {where(stats.broken)}: {changed} ({computed})"
    if gone:
        return f"{gone}: prefilled again ({computed})"
    if cause == "moved":
        return f"moved off a busier engine: prefilled again ({computed})"
    paused = "paused to make room, and " if cause == "paused" else ""
    idle = "" if stats.idle_s is None else f" while idle for {_seconds(stats.idle_s)}"
    return f"{paused}evicted{idle} ({computed})"


def where(broken: Broken) -> str:
    if broken.place != "messages":
        return "before its first answer" if broken.place == "first_prompt" else "at its beginning"
    after = f"message {broken.messages}" if broken.messages else "its first prompt"
    return f"after {after}" + ("" if broken.exact else " or later")


def _seconds(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s < 10 else f"{time_s:.0f} s"
