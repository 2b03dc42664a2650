"""Whether one more system has room in memory, from what those that are up were seen to take."""

from collections.abc import Sequence
from dataclasses import dataclass

_GB = 1e9
# Left to what else the machine does, of all its memory.
_SPARE = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """Tells what was seen before another system is started.

    Attributes:
        total_bytes: the machine's memory.
        free_bytes: what of it processes can still have.
        up_bytes: what each system that is up has now.
        most_bytes: the most that any system was seen to have so far, at any time. Every other one,
            up or not, is taken to come to that, since all have the same engines.
    """

    total_bytes: int
    free_bytes: int
    up_bytes: Sequence[int]
    most_bytes: int

    @property
    def left_bytes(self) -> float:
        """Return what is left for more systems once those that are up have grown."""
        grow = sum(max(0, self.most_bytes - now) for now in self.up_bytes)
        return self.free_bytes - grow - _SPARE * self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether one more system has room.

        >>> Room(24 * 10**9, 10 * 10**9, [4 * 10**9], 4 * 10**9).fits
        True
        >>> Room(24 * 10**9, 5 * 10**9, [4 * 10**9], 4 * 10**9).fits
        False
        """
        return self.left_bytes >= self.most_bytes

    def told(self) -> str:
        """Say what was seen, in a sentence."""
        verdict = "so one more fits" if self.fits else "so no more fit"
        return (
            f"{self.free_bytes / _GB:.1f} GB of memory are free beside {len(self.up_bytes)} "
            f"system{'s' * (len(self.up_bytes) != 1)}, and one was seen to take "
            f"{self.most_bytes / _GB:.1f} GB: {verdict}"
        )
