"""Limits of what a tenant may have at a time."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

# New conversations are counted over this time.
MINUTE_S = 60

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tenant's limits; None means no limit.

    Attributes:
        turns: turns at a time, those that wait for room included.
        held_tokens: tokens of KV held for its conversations. At this, no turn begins until
            conversations have ended; and none is bound that would exceed it.
        conversations: live conversations; one with several histories counts once for each.
        new_per_minute: conversations, or further histories, begun within a minute.
    """

    turns: _Count | None = None
    held_tokens: _Count | None = None
    conversations: _Count | None = None
    new_per_minute: _Count | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """A limit that a turn would break.

    Attributes:
        limit: its name, a field of `Limits`.
        retry_after_s: when to try again.
        never: whether the same turn would break it then, too.
    """

    limit: str
    allowed: int
    retry_after_s: int
    never: bool = False
