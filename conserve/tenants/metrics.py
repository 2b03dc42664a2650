"""The metrics of tenants; of so many by name, so that `/metrics` stays short."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.tenants.keyfile import OTHER_TENANTS
from conserve.tenants.limits import UsageBook

NAMED_AT_MOST = 100


class TenantMetrics(Collector):
    """Counters and gauges by tenant: the first so many that were heard of, and all others as one.

    Args:
        usage: what each tenant has.
    """

    def __init__(self, usage: UsageBook) -> None:
        self._usage = usage
        self._named: set[str] = set()
        self._turns: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()

    def turn(self, tenant: str, outcome: str) -> None:
        """Count a turn that has ended."""
        self._turns[self._label(tenant), outcome] += 1

    def refused(self, tenant: str, limit: str) -> None:
        """Count a turn that was refused for a limit's sake."""
        self._refusals[self._label(tenant), limit] += 1

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        usage = self._usage.tenants()
        if not usage and not self._turns and not self._refusals:
            return
        has: dict[str, list[int]] = {}
        for tenant, one in usage.items():
            sums = has.setdefault(self._label(tenant), [0, 0, 0])
            for place, value in enumerate((one.turns, one.held_tokens, one.conversations)):
                sums[place] += value
        gauges = (
            ("conserve_tenant_running_turns", "Turns under way, by tenant."),
            ("conserve_tenant_held_tokens", "Tokens of KV held for conversations, by tenant."),
            ("conserve_tenant_conversations", "Live conversations, by tenant."),
        )
        for place, (name, text) in enumerate(gauges):
            gauge = GaugeMetricFamily(name, text, labels=["tenant"])
            for label, sums in has.items():
                gauge.add_metric([label], sums[place])
            yield gauge
        turns = CounterMetricFamily(
            "conserve_tenant_turns", "Turns, by tenant and outcome.", labels=["tenant", "outcome"]
        )
        refusals = CounterMetricFamily(
            "conserve_tenant_refusals",
            "Turns refused because of a tenant's limit, by which.",
            labels=["tenant", "limit"],
        )
        for family, counts in ((turns, self._turns), (refusals, self._refusals)):
            for labels, count in counts.items():
                family.add_metric(list(labels), count)
            yield family

    def _label(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= NAMED_AT_MOST:
                return OTHER_TENANTS
            self._named.add(tenant)
        return tenant
