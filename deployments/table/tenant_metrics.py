"""The metrics of tenants: their usage, turns, refusals and tokens."""

from collections import Counter as Counts
from collections.abc import Callable
from math import exp2

from conserve.clock import unix_s
from conserve.tenants.keyfile import OTHER_TENANTS
from conserve.tenants.limits import TenantUsage, UsageBook
from conserve.turn import TurnStats
from deployments.table.metrics import COUNTER, GAUGE, Row, Samples

# Tenants beyond these are counted together, so that `/metrics` stays short.
NAMED_TENANTS = 100
TOKEN_KINDS = ("computed", "cached", "output")
# For fairness, service counts half after the first time, and a tenant for the second after a turn.
_HALF_S, _COUNTS_S = 60.0, 300.0


class TenantCounts:
    """Counts turns and tokens by tenant: the first `NAMED_TENANTS` by name, all others as one.

    Turns without keys have no tenant; their tokens are counted under the name "".
    """

    def __init__(self, usage: UsageBook) -> None:
        self.usage = usage
        # By tenant, the tokens of late, and when it last asked for a turn or had one.
        self._lately: dict[str, tuple[float, float]] = {}
        self.turns: Counts[tuple[str, str]] = Counts()
        self.refusals: Counts[tuple[str, str]] = Counts()
        self.tokens: Counts[tuple[str, str]] = Counts()
        self._named: set[str] = set()

    def turn(self, tenant: str, outcome: str) -> None:
        self.turns[self.label(tenant), outcome] += 1

    def refused(self, tenant: str, limit: str) -> None:
        self.refusals[self.label(tenant), limit] += 1

    def begins(self, tenant: str | None) -> None:
        """Have the tenant's counters at 0 before its first turn ends, or gets room."""
        label = self.label(tenant or "")
        self._serve(tenant or "", 0)
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
        self._serve(tenant or "", stats.computed_tokens)
        computed = max(0, stats.prompt_tokens - stats.found_tokens)
        self.tokens[label, "computed"] += computed
        self.tokens[label, "cached"] += max(0, stats.found_tokens - stats.remote_tokens)
        self.tokens[label, "output"] += stats.output_tokens

    def fairness(self) -> float | None:
        """Return Jain's index of tenants' service of late, by weight; None: none had any."""
        now_s = unix_s()
        shares = [
            self._served(name, now_s) / usage.weight
            for name, usage in self.usage.tenants().items()
            if usage.turns or now_s - self._lately.get(name, (0.0, 0.0))[1] < _COUNTS_S
        ]
        squares = sum(share * share for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if squares else None

    def _serve(self, tenant: str, tokens: int) -> None:
        self._lately[tenant] = self._served(tenant, unix_s()) + tokens, unix_s()

    def _served(self, tenant: str, now_s: float) -> float:
        tokens, at_s = self._lately.get(tenant, (0.0, now_s))
        return tokens * exp2(min(0.0, at_s - now_s) / _HALF_S)

    def label(self, tenant: str) -> str:
        """Return the tenant's name, or that of all others."""
        if tenant and tenant not in self._named:
            if len(self._named) >= NAMED_TENANTS:
                return OTHER_TENANTS
            self._named.add(tenant)
        return tenant


def _usage(read: Callable[[TenantUsage], int]) -> Callable[[TenantCounts], Samples]:
    def samples(tenants: TenantCounts) -> Samples:
        sums: Counts[str] = Counts()
        for tenant, usage in tenants.usage.tenants().items():
            sums[tenants.label(tenant)] += read(usage)
        return sums.items()

    return samples


TENANTS: tuple[Row[TenantCounts], ...] = (
    Row(
        COUNTER, "conserve_tokens",
        "Tokens of turns that have ended, by tenant (empty without keys): prompt tokens that "
        "engines computed (computed) or found in a cache (cached), and the longest choices "
        "(output).",
        ("tenant", "kind"),
        lambda tenants: [(*key, count) for key, count in tenants.tokens.items()],
    ),
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
        GAUGE, "conserve_tenant_fairness",
        "Jain's index of tenants' service by weight, over some minutes: 1 if all with turns had "
        "alike, 1/n if one of n had all.",
        (), TenantCounts.fairness,
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
