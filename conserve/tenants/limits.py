"""Limits of what a tenant may have at a time, and what it has."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from conserve import identity

# New conversations are counted over this time.
MINUTE_S = 60

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tenant's limits; None means no limit.

    Attributes:
        turns: at a time, those that wait for room included.
        held_tokens: at this, no turn begins; and none is bound that would exceed it.
        conversations: live ones; one with several histories counts once for each.
        new_per_minute: conversations, or further histories, begun within a minute.
    """

    turns: _Count | None = None
    held_tokens: _Count | None = None
    conversations: _Count | None = None
    new_per_minute: _Count | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """A limit (a field of `Limits`) that a turn would break; ``never``: a retry would, too."""

    limit: str
    allowed: int
    retry_after_s: int
    never: bool = False


@dataclass(slots=True)
class TenantUsage:
    """Counts of one tenant in a conversation table; ``held_tokens`` includes promised ones.

    ``weight`` is its share of service, as its last conversation that was placed had it.
    """

    turns: int = 0
    held_tokens: int = 0
    conversations: int = 0
    histories: int = 0
    weight: int = 1
    # How many histories began in each second of the last minute.
    _began: dict[int, int] = field(default_factory=dict)

    def began(self, at_s: float) -> None:
        """Note that a history has begun: now, or under a table before this one."""
        self._began[int(at_s)] = self._began.get(int(at_s), 0) + 1
        if len(self._began) > 2 * MINUTE_S:
            self._forget(max(self._began))

    def begun_lately(self, now_s: float) -> int:
        self._forget(int(now_s))
        return sum(self._began.values())

    def fewer_in_s(self, now_s: float) -> int:
        """Return how long until fewer have begun lately, in whole seconds, at least 1."""
        self._forget(int(now_s))
        return max(1, min(self._began, default=0) + MINUTE_S - int(now_s))

    def _forget(self, second: int) -> None:
        # A decoder's clock may put one into the future, which was known under another table.
        for other in [one for one in self._began if not second - MINUTE_S < one <= second]:
            del self._began[other]


class UsageBook:
    """Tenants' usage, by name; conversations without a tenant have the name ""."""

    def __init__(self) -> None:
        self._usage: defaultdict[str, TenantUsage] = defaultdict(TenantUsage)

    def of(self, history_id: str) -> TenantUsage:
        return self.tenant(identity.tenant_of(history_id) or "")

    def tenant(self, name: str) -> TenantUsage:
        return self._usage[name]

    def tenants(self) -> dict[str, TenantUsage]:
        return {name: usage for name, usage in self._usage.items() if name}
