"""What a run has seen so far, and what must not have happened."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

# A router is back within so long, and engines' replacements register within so long.
_ROUTER_BACK_S = 90.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn's answer, to be compared with the undisturbed one.

    Attributes:
        messages: all that was sent.
    """

    key: str
    messages: tuple[dict[str, str], ...]
    output_tokens: int
    content: str


@dataclass
class Tally:
    """Counts, by cause, and failures, in words.

    Args:
        say: told of kills and failures as they happen.

    Attributes:
        live: conversations under way.
        ended: conversations whose clients have come to their end, be it that they left for good.
        counted: how far metrics rose in the whole run.
        held: what the engine has counted for a named conversation that lives yet, in tokens.
        last: of those, the ones whose last turn may have been cut since, and hold something else.
    """

    say: Callable[[str], None] = lambda text: None
    began_s: float = field(default_factory=time.monotonic)
    live: int = 0
    ended: int = 0
    turns: int = 0
    streams: int = 0
    misdeeds: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    _shown: dict[str, int] = field(default_factory=dict)
    answers: list[Answered] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    ties: int = 0
    router_killed_s: float = float("-inf")
    # While no decoder lived: from, until.
    without_decoder: list[tuple[float, float]] = field(default_factory=list)

    def count(self, name: str, shown: float) -> None:
        """Note a metric that counts, and begins at 0 again with each process that has it."""
        before, self._shown[name] = self._shown.get(name, 0), int(shown)
        self.counted[name] += int(shown) - (before if shown >= before else 0)

    def fail(self, what: str) -> None:
        """Note what must not have happened."""
        self.failures.append(what)
        self.say(f"FAILED: {what}")

    def broken(self, key: str, why: str, streaming: bool) -> None:
        """A connection to the router broke, or could not be made."""
        if time.monotonic() - self.router_killed_s > _ROUTER_BACK_S:
            self.fail(f"{key}: the connection broke ({why}), and no router had died")
        if streaming:
            self.cut["router"] += 1
        self.retries["router gone"] += 1

    def stream_failed(self, key: str, code: str, began_s: float) -> None:
        """A stream ended with an error event."""
        now_s = time.monotonic()
        alone = any(since < now_s and began_s < until for since, until in self.without_decoder)
        # What two engines died with goes to no third.
        twice = code == "engines_lost"
        cause = "two engines" if twice else "no decoder left" if alone else "decoder"
        self.cut[cause] += 1
        self.retries[f"stream cut: {code}"] += 1
        if not alone and not twice:
            self.fail(f"{key}: a stream was cut ({code}), though a decoder lived")
