"""Which prefills are kept from decodes altogether: the lane beside an engine's steps."""

from typing import Literal

Route = Literal["inline", "lane", "wait"]


class PrefillLane:
    """Which calls go through the prefill lane (AgentServe, algorithm 1, lines 11 to 16).

    There a decode, or a prefill no longer than the budget B, goes to Q_D, which runs on the
    decodes' part of the GPU, and any other prefill to Q_P, the lane. Q_D are an engine's steps
    here. Departures, and what the paper leaves open:

    - Length is what has to be *computed*: tokens that no cache has. Line 13 goes by length alone,
      the prose has every cold prompt apart; this follows the line, since a short cold prompt
      costs decodes no more than a short append.
    - The lane is used only beside decodes. Where nobody decodes there is nobody to keep it from,
      and a step computes a prompt sooner.
    - One prefill at a time: two would share what the lane has, and both be late. Q_P is no queue
      of its own: those who wait for the lane stay where they are, in the scheduler's order of
      levels, and hold no blocks.
    - At most ``most_waiting`` wait for it, and none for longer than ``longest_wait_s``: further
      ones run inline, cut to the budget, so nobody starves behind a long prompt. The paper has no
      bound.
    - The prompt's last token is computed inline always: its logits are the first token's.

    Args:
        most_waiting: so many may wait while one is prefilled.
        longest_wait_s: then a call runs inline.

    Attributes:
        current: whose prefill is under way; None: nobody's.
        current_tokens: of it, what is left to compute.
        done, failed: prefills, since the engine's start; of both, those whose client left count
            as neither.
        computed_tokens: in the lane, since then.

    Raises:
        ValueError: a setting is out of its range; says which.

    Example:
        >>> lane = PrefillLane()
        >>> def route(name, missing):
        ...     return lane.route(name, missing, budget_tokens=256, decoding=True, now_s=0.0)
        >>> route("append", 79), route("long", 3_000)
        ('inline', 'lane')
        >>> lane.takes("long", 2_999)
        >>> route("longer", 4_000)
        'wait'
        >>> lane.route("longer", 4_000, budget_tokens=256, decoding=True, now_s=2.5)
        'inline'
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
        """How many wait for the lane."""
        return len(self._since_s)

    def route(
        self, name: str, missing_tokens: int, budget_tokens: int, decoding: bool, now_s: float
    ) -> Route:
        """Return where a call that could begin now is prefilled; ``wait``: ask again.

        Args:
            missing_tokens: of its prompt, what has to be computed.
            budget_tokens: what a step may prefill beside decodes.
            decoding: whether anybody decodes.
        """
        if not decoding or missing_tokens <= budget_tokens:
            self._since_s.pop(name, None)
            return "inline"
        if self.current is None:
            return "lane"
        since_s = self._since_s.get(name)
        if since_s is None:
            if len(self._since_s) >= self._most_waiting:
                return "inline"
            since_s = self._since_s[name] = now_s
        # It keeps its place until it begins: there may be no room for it yet.
        return "wait" if now_s - since_s < self._longest_wait_s else "inline"

    def takes(self, name: str, tokens: int) -> None:
        """A call's prefill of so many tokens goes to the lane.

        Raises:
            ValueError: another one is there.
        """
        if self.current is not None:
            raise ValueError(f"{self.current} is in the lane, and so cannot {name} be")
        self._since_s.pop(name, None)
        self.current, self.current_tokens = name, tokens

    def computed(self, name: str, tokens: int) -> None:
        """So much more of a prefill is done."""
        self.computed_tokens += tokens
        if name == self.current:
            self.current_tokens -= tokens

    def ends(self, name: str, outcome: Literal["done", "failed", "cut"]) -> None:
        """A prefill has left the lane."""
        if name == self.current:
            self.current, self.current_tokens = None, 0
            self.done += outcome == "done"
            self.failed += outcome == "failed"

    def forget(self, name: str) -> None:
        """A call waits no more for the lane: it has begun inline, or ended."""
        self._since_s.pop(name, None)
