"""The metrics of tenants: their usage, turns, refusals and tokens."""

from collections import Counter as Counts
from collections.abc import Callable

from conserve.tenants.keyfile import OTHER_TENANTS
from conserve.tenants.limits import TenantUsage, UsageBook
from conserve.turn import TurnStats
from deployments.table.metrics import COUNTER, GAUGE, Row, Samples

# Tenants beyond these are counted together, so that `/metrics` stays short.
NAMED_TENANTS = 100
TOKEN_KINDS = ("computed", "cached", "output")


class TenantCounts:
    """Counts turns and tokens by tenant: the first `NAMED_TENANTS` by name, all others as one.

    Turns without keys have no tenant; their tokens are counted under the name "".
    """

    def __init__(self, usage: UsageBook) -> None:
        self.usage = usage
        self.turns: Counts[tuple[str, str]] = Counts()
        self.refusals: Counts[tuple[str, str]] = Counts()
        self.tokens: Counts[tuple[str, str]] = Counts()
        self._named: set[str] = set()

    def turn(self, tenant: str, outcome: str) -> None:
        self.turns[self.label(tenant), outcome] += 1

    def refused(self, tenant: str, limit: str) -> None:
        self.refusals[self.label(tenant), limit] += 1

    def begins(self, tenant: str | None) -> None:
        """Have the tenant's counters at 0 before its first turn ends."""
        label = self.label(tenant or "")
        for kind in TOKEN_KINDS:
            self.tokens[label, kind] += 0

    def prefilled(self, tenant: str | None, tokens: int) -> None:
        """Count prompt tokens that a prefiller computed."""
        self.tokens[self.label(tenant or ""), "computed"] += tokens

    def spent(self, tenant: str | None, stats: TurnStats) -> None:
        """Count the tokens of a turn that has ended.

        What a prefiller computed of it, and its decoder found in LMCache, is counted already.
        """
        if not stats.output_tokens:
            # It was cut, perhaps before any of its prompt was computed.
            return
        label = self.label(tenant or "")
        computed = max(0, stats.prompt_tokens - stats.found_tokens)
        self.tokens[label, "computed"] += computed
        self.tokens[label, "cached"] += max(0, stats.found_tokens - stats.remote_tokens)
        self.tokens[label, "output"] += stats.output_tokens

    def label(self, tenant: str) -> str:
        """Return the tenant's name, or that of all others."""
        if tenant and tenant not in self._named:
            if len(self._named) >= NAMED_TENANTS:
                return OTHER_TENANTS
            self._named.add(tenant)
        return tenant

    def any(self) -> bool:
        return bool(self.usage.tenants() or self.turns or self.refusals)


def _usage(read: Callable[[TenantUsage], int]) -> Callable[[TenantCounts], Samples]:
    def samples(tenants: TenantCounts) -> Samples:
        sums: Counts[str] = Counts()
        for tenant, usage in tenants.usage.tenants().items():
            sums[tenants.label(tenant)] += read(usage)
        return sums.items()

    return samples


TENANTS: tuple[Row[TenantCounts], ...] = (
    Row(
        GAUGE, "conserve_tenant_running_turns", "Running turns, by tenant.",
        ("tenant",), _usage(lambda usage: usage.turns),
    ),
    Row(
        GAUGE, "conserve_tenant_held_tokens", "Tokens of KV held for conversations, by tenant.",
        ("tenant",), _usage(lambda usage: usage.held_tokens),
    ),
    Row(
        GAUGE, "conserve_tenant_conversations", "Live conversations, by tenant.",
        ("tenant",), _usage(lambda usage: usage.conversations),
    ),
    Row(
        COUNTER, "conserve_tenant_turns", "Turns, by tenant and outcome.",
        ("tenant", "outcome"),
        lambda tenants: [(*key, count) for key, count in tenants.turns.items()],
    ),
    Row(
        COUNTER, "conserve_tenant_refusals",
        "Turns refused because of a tenant's limit, by tenant and limit.",
        ("tenant", "limit"),
        lambda tenants: [(*key, count) for key, count in tenants.refusals.items()],
    ),
)  # fmt: skip
# Also without keys.
TOKENS: tuple[Row[TenantCounts], ...] = (
    Row(
        COUNTER, "conserve_tokens",
        "Tokens of turns that have ended, by tenant (empty without keys): prompt tokens that "
        "engines computed (computed) or found in a cache (cached), and the longest choices "
        "(output).",
        ("tenant", "kind"),
        lambda tenants: [(*key, count) for key, count in tenants.tokens.items()],
    ),
)  # fmt: skip
