"""Kinds of calls, and the lane for long prefills."""

from typing import Final, Literal

Kind = Literal["cold", "resume", "decode"]
KINDS: Final[tuple[Kind, ...]] = ("cold", "resume", "decode")


def kind_of(is_decoding: bool, found_tokens: int, missing_tokens: int, budget_tokens: int) -> Kind:
    """Classify a call (AgentServe, algorithm 1, lines 11 to 16).

    Args:
        found_tokens: of its prompt, what caches have.
        missing_tokens: the rest; an append computes up to a block more than it is long.
        budget_tokens: what a step may prefill beside decodes.
    """
    if is_decoding:
        return "decode"
    return "resume" if found_tokens > 0 and missing_tokens <= budget_tokens else "cold"


Route = Literal["inline", "lane", "wait"]


class PrefillLane:
    """Routes calls to the prefill lane (AgentServe, algorithm 1, lines 11 to 16).

    Q_D of the paper is the engine's steps here, and Q_P the lane, which computes one prefill at a
    time and only beside decodes. At most ``most_waiting`` calls wait for it, none longer than
    ``longest_wait_s``; others run inline, cut to the budget. See README.md for departures.

    Attributes:
        current: the call in the lane; None if it is free.
        done, failed: prefills since the engine's start; one whose client left counts as neither.
    """

    def __init__(self, *, most_waiting: int = 8, longest_wait_s: float = 2.0) -> None:
        if most_waiting < 0:
            raise ValueError(f"most_waiting: {most_waiting} is below 0")
        if not longest_wait_s >= 0:
            raise ValueError(f"longest_wait_s: {longest_wait_s} is below 0")
        self._most_waiting = most_waiting
        self._longest_wait_s = longest_wait_s
        self._since_s: dict[str, float] = {}
        self.current: str | None = None
        self.current_tokens = 0
        self.done = self.failed = self.computed_tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._since_s)

    def route(
        self,
        name: str,
        missing_tokens: int,
        budget_tokens: int,
        decoding: bool,
        now_s: float,
        *,
        free: bool = True,
    ) -> Route:
        """Return where a call that could begin now is prefilled; ``wait`` means to ask again.

        With ``free`` False something else is in the lane.
        """
        if not decoding or missing_tokens <= budget_tokens:
            self._since_s.pop(name, None)
            return "inline"
        if self.current is None and free:
            return "lane"
        since_s = self._since_s.get(name)
        if since_s is None:
            if len(self._since_s) >= self._most_waiting:
                return "inline"
            since_s = self._since_s[name] = now_s
        # It keeps its place until it begins, since it may not have room yet.
        return "wait" if now_s - since_s < self._longest_wait_s else "inline"

    def takes(self, name: str, tokens: int) -> None:
        """Put a call's prefill into the lane; ValueError if it has another one."""
        if self.current is not None:
            raise ValueError(f"{name} cannot enter the lane: {self.current} is in it")
        self._since_s.pop(name, None)
        self.current, self.current_tokens = name, tokens

    def computed(self, name: str, tokens: int) -> None:
        self.computed_tokens += tokens
        if name == self.current:
            self.current_tokens -= tokens

    def ends(self, name: str, outcome: Literal["done", "failed", "cut"]) -> None:
        if name == self.current:
            self.current, self.current_tokens = None, 0
            self.done += outcome == "done"
            self.failed += outcome == "failed"

    def forget(self, name: str) -> None:
        self._since_s.pop(name, None)
