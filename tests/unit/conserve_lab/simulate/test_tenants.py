"""Tenants whose conversations are never idle share a simulated engine that has room for few."""

from collections import Counter
from dataclasses import replace

from conserve import identity
from conserve_lab.records import TurnRecord
from conserve_lab.simulate import Cluster, System
from tests.unit.conserve_lab.simulate.scenes import COSTS, Scripted

# Each turn's prompt is as long, and but for its end as the one before.
_TURNS = [(8_000, 0, 40, 0.0)] + [(8_000, 7_950, 40, 0.0)] * 1_000


def _served(
    conversations: dict[str, int], weights: dict[str, int] | None = None
) -> tuple[Counter[str | None], Counter[str | None]]:
    """Return the tokens and the turns of each tenant after 100 s of 400."""
    plan = [
        (0.0, Scripted(_TURNS, identity.scoped(tenant, str(number))))
        for tenant, count in conversations.items()
        for number in range(count)
    ]
    engine = replace(COSTS, capacity_tokens=46_000)
    system = System(
        "elastic_pausing", "elastic", (), (engine,), pausing=True, weights=weights or {}
    )
    records: list[TurnRecord] = []
    Cluster(system, records.extend).run_programs(plan, len(plan), 400.0, ramp_s=60.0)
    served, ended = Counter[str | None](), Counter[str | None]()
    for one in records:
        if one.outcome == "completed" and one.ended_s > 100.0:
            tenant = identity.tenant_of(one.conversation)
            served[tenant] += one.prompt_tokens - (one.cached_tokens or 0) + one.output_tokens
            ended[tenant] += 1
    return served, ended


def test_tenants_are_served_alike_and_one_that_asks_for_little_as_if_it_were_alone() -> None:
    """The engine has room for five of seventeen."""
    served, turns = _served({"many": 10, "some": 6, "one": 1})
    assert abs(served["many"] - served["some"]) < 0.1 * served["many"]
    _, unsaturated = _served({"many": 3, "some": 1, "one": 1})
    assert turns["one"] > 0.9 * unsaturated["one"]


def test_tenants_are_served_by_their_weights() -> None:
    served, _ = _served({"three": 10, "one": 10}, {"three": 3})
    assert abs(served["three"] / served["one"] - 3) < 0.3
