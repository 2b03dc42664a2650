"""Which idle histories give up their room, and in which order."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from conserve.pausing.gaps import Gaps

# A turn that comes within so many seconds comes soon: about as long as a long prefill takes.
_SOON_S = 30.0
# How long an engine may be told to hold a history's KV between turns, and the least of it.
_HOLDS_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# Of those who come back within the longest, so many are back by then.
_HELD_SHARE = 0.9
# A prompt of so many tokens takes twice as long to prefill as its tokens would without attention to
# each other. It only orders histories of different lengths.
_ATTENTION_TOKENS = 32_768
# To take a token from host memory takes this share of the time to compute it: by the published
# figures for an 8B model on an H100, from 0.38 of a short prompt's to 0.17 of one of 64k tokens.
_RELOAD = 0.25


@dataclass(frozen=True, slots=True)
class Idle:
    """A history on a decoder of which no turn runs.

    Attributes:
        held_tokens: what it is counted with.
        freed_tokens: of these, what its decoder has free when it goes: nobody else begins with
            them.
        left_tokens: of these, what the engine should have yet; the rest is lost already.
        idle_s: since its last turn ended; or since its client has reported the start, or the end,
            of a tool (`RunningTools`).
        still_idle: how many others that wait for the same are idle for at least half as long: where
            many are, they are not likely to come back.
        parked_tokens: so many are in host memory too, from its beginning on, and will be for
            `Pausing.kept_s`, as far as is known.
        tool: which one it waits for; see `Gaps.returned`.
        tool_ended: whether that was reported to be done.
    """

    id: str
    held_tokens: int
    freed_tokens: int
    left_tokens: int
    idle_s: float
    still_idle: int = 0
    parked_tokens: int = 0
    tool: str | None = None
    tool_ended: bool = False


@dataclass(frozen=True, slots=True)
class Pausing:
    """Idle histories give up their room in the order of what that is expected to cost.

    The cost of one is the time to compute what the engine has of it, or to take it from host memory
    where that has it too, times the chance that it comes back soon, for each token that it frees.
    The chance is that of the gaps seen so far (`Gaps`), by the tool that the history waits for, so
    it falls with the time that a history has been idle, and with the number of those that have not
    come back either. Where a client has reported that the tool is done, it is that of the times
    between such reports and turns. Of histories that
    are equally likely to come back the short ones go first, as in ThunderAgent (equations 8 to 11),
    where that follows from recomputation that grows with the square of the length; here it grows
    with n + n^2 / 32768.

    While turns run, a new prompt takes the room of those alone that are *away*, unlikely to be back
    soon or lost to their engine already, and of those that are *parked*: host memory has most of
    them, so to be back costs a reload. To take the room of others moves work from one prompt to the
    next: simulated with recorded agent sessions, more is computed again than is gained
    (docs/scheduling.md). For the same reason nobody is away before both say so, the gaps of its
    tool and those of all: to know the tool keeps some more on their decoders, and sends nobody away
    sooner. Above the mark, where more is bound than fits, the others go after these.

    It departs from ThunderAgent in three ways. A pause costs nothing by itself: the engine keeps
    the KV until it needs the room, and who comes back before finds it (`EngineCache`). So nothing
    is discounted by idle time before it is paused (equation 7); what is idle is paused where its
    room is asked for. And just enough is paused, not all that is acting.

    Settings:
        mark: the share of a decoder's capacity (lambda_max) above which idle histories give up
            room, though nobody waits for it: running turns have grown into it.
        away_chance: whose chance to be back soon is below this is away.
        park_mark: the share of its decoder's capacity from which on a turn leaves its KV in host
            memory too. Below it nobody's room will be asked for soon.
        kept_s: where host memory does not keep KV for so long, by the age of the oldest there, it
            is of no use to those who have to come back after others.
        patience_s: a history that was paused, and is back, waits no longer than this for others to
            be away.

    Attributes:
        gaps: between turns, by tool.
        resumes: from the reported end of a tool to the next turn.

    Example:
        >>> policy = Pausing()
        >>> idle = [Idle("long", 8000, 8000, 8000, 5.0), Idle("short", 900, 900, 900, 5.0),
        ...         Idle("gone", 4000, 4000, 4000, 600.0), Idle("lost", 4000, 4000, 0, 5.0)]
        >>> [one.id for one in policy.order(idle)]
        ['lost', 'gone', 'short', 'long']
        >>> [one.id for one in idle if policy.is_away(one)]
        ['gone', 'lost']
    """

    mark: float = 1.0
    away_chance: float = 0.2
    park_mark: float = 0.5
    kept_s: float = 60.0
    patience_s: float = 50.0
    gaps: Gaps = field(default_factory=Gaps)
    resumes: Gaps = field(default_factory=Gaps)

    def order(self, idle: Iterable[Idle]) -> list[Idle]:
        """The cheapest first."""
        return sorted(idle, key=self.cost)

    def cost(self, one: Idle) -> float:
        """Return the expected cost of each token that it frees; in no unit."""
        return self.price(one) / max(1, one.freed_tokens)

    def price(self, one: Idle) -> float:
        """Return the expected cost; in no unit."""
        reloaded = min(one.left_tokens, one.parked_tokens)
        computed = one.left_tokens - reloaded
        computed_for = computed * (1.0 + one.held_tokens / _ATTENTION_TOKENS)
        return (computed_for + _RELOAD * reloaded) * self._chance(one)

    def is_away(self, one: Idle) -> bool:
        """Whether it is unlikely to be back soon, or would find less than half of itself."""
        if 2 * one.left_tokens < one.held_tokens:
            return True
        of_all = self.gaps.chance(one.idle_s, _SOON_S, one.still_idle)
        return max(of_all, self._chance(one)) < self.away_chance

    def may_go(self, one: Idle) -> bool:
        """Whether it gives up its room for a new prompt: it is away, or costs a reload at most."""
        return 2 * one.parked_tokens >= one.held_tokens or self.is_away(one)

    def parks(self, held_tokens: int, capacity_tokens: int) -> bool:
        """Whether a turn on a decoder that holds so much leaves its KV in host memory too."""
        return held_tokens >= self.park_mark * capacity_tokens

    def hold_s(self, tool: str | None) -> float:
        """How long an engine is to hold a history's KV for its next turn, from the last one's end.

        Until nine in ten are back of those who come within a minute; for no time where less than
        half of all do.

        Args:
            tool: what the history waits for; None: that is not known.
        """
        back = [self.gaps.chance(0.0, within_s, tool=tool) for within_s in _HOLDS_S]
        if back[-1] < 0.5:
            return 0.0
        return next(
            hold_s
            for hold_s, share in zip(_HOLDS_S, back, strict=True)
            if share >= _HELD_SHARE * back[-1]
        )

    def excess_tokens(self, held_tokens: int, capacity_tokens: int) -> int:
        """How much of what a decoder holds is above the mark."""
        return max(0, held_tokens - int(self.mark * capacity_tokens))

    def _chance(self, one: Idle) -> float:
        if one.tool_ended:
            return self.resumes.chance(one.idle_s, _SOON_S, one.still_idle)
        return self.gaps.chance(one.idle_s, _SOON_S, one.still_idle, one.tool)
