"""In which order idle histories give up their room."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from conserve.pausing.gaps import Gaps

# A turn that comes within so many seconds comes soon: about as long as a long prefill takes.
_SOON_S = 30.0
# A prompt of so many tokens takes twice as long to prefill as its tokens would without attention to
# each other. It only orders histories of different lengths.
_ATTENTION_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Idle:
    """A history on a decoder of which no turn runs.

    Attributes:
        freed_tokens: what its decoder has free when it goes: nobody else begins with these.
        held_tokens: what has to be computed, or loaded, when it comes back.
        idle_s: since its last turn ended.
    """

    id: str
    freed_tokens: int
    held_tokens: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Pausing:
    """Idle histories give up their room in the order of what that is expected to cost.

    The cost of one is the time to compute it again times the chance that it comes back soon, for
    each token that it frees. The chance is that of the gaps seen so far (`Gaps`), so it falls with
    the time that a history has been idle. Of histories that are equally likely to come back the
    short ones go first, as in ThunderAgent (equations 8 to 11), where that follows from
    recomputation that grows with the square of the length; here it grows with n + n^2 / 32768.

    It departs from ThunderAgent in three ways. A pause costs nothing by itself: the engine keeps
    the KV until it needs the room, and who comes back before finds it (`EngineCache`). So nothing
    is discounted by idle time before it is paused (equation 7); what is idle is paused where its
    room is asked for. And just enough is paused, not all that is acting.

    Settings:
        mark: the share of a decoder's capacity (lambda_max) above which idle histories give up
            room, though nobody waits for it: running turns have grown into it.

    Example:
        >>> policy = Pausing()
        >>> idle = [Idle("long", 8000, 8000, 5.0), Idle("short", 900, 900, 5.0),
        ...         Idle("gone", 4000, 4000, 600.0)]
        >>> [one.id for one in policy.order(idle)]
        ['gone', 'short', 'long']
    """

    mark: float = 1.0
    gaps: Gaps = field(default_factory=Gaps)

    def order(self, idle: Iterable[Idle]) -> list[Idle]:
        """Those that free anything, the cheapest first."""
        return sorted((one for one in idle if one.freed_tokens > 0), key=self.cost)

    def cost(self, one: Idle) -> float:
        """What it is expected to cost, for each token that it frees; in no unit."""
        prefill = one.held_tokens * (1.0 + one.held_tokens / _ATTENTION_TOKENS)
        return prefill * self.gaps.chance(one.idle_s, _SOON_S) / one.freed_tokens

    def is_away(self, idle_s: float) -> bool:
        """Whether a history that is idle for so long will rather not be back soon."""
        return self.gaps.chance(idle_s, _SOON_S) < 0.5

    def excess_tokens(self, held_tokens: int, capacity_tokens: int) -> int:
        """How much of what a decoder holds is above the mark."""
        return max(0, held_tokens - int(self.mark * capacity_tokens))
