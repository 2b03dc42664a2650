"""Counts what each tenant has at the moment: turns, tokens of KV, conversations."""

from dataclasses import dataclass, field

from conserve import identity
from conserve.tenants.limits import MINUTE_S


@dataclass(slots=True)
class TenantUsage:
    """Counts of one tenant in a conversation table; ``held_tokens`` includes promised ones."""

    turns: int = 0
    held_tokens: int = 0
    conversations: int = 0
    histories: int = 0
    # How many histories began in each second of the last minute.
    _began: dict[int, int] = field(default_factory=dict)

    def began(self, at_s: float) -> None:
        """Note that a history has begun: now, or under a table before this one."""
        self._began[int(at_s)] = self._began.get(int(at_s), 0) + 1
        if len(self._began) > 2 * MINUTE_S:
            self._forget(max(self._began))

    def begun_lately(self, now_s: float) -> int:
        """Return how many histories have begun within the last minute."""
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
    """Tenants' usage, by name; conversations without a tenant have the name "".

    Names come from the key file, so nothing is ever dropped.
    """

    def __init__(self) -> None:
        self._nobodys = TenantUsage()
        self._usage: dict[str, TenantUsage] = {"": self._nobodys}

    def of(self, history_id: str) -> TenantUsage:
        """Return the usage of this history's tenant."""
        name = identity.tenant_of(history_id)
        return self._nobodys if name is None else self.tenant(name)

    def tenant(self, name: str) -> TenantUsage:
        usage = self._usage.get(name)
        if usage is None:
            usage = self._usage[name] = TenantUsage()
        return usage

    def tenants(self) -> dict[str, TenantUsage]:
        return {name: usage for name, usage in self._usage.items() if name}
