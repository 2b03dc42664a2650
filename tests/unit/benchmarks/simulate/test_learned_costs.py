"""Elastic placement with costs that it learns from noisy reports, against exact ones."""

import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest

from benchmarks.records import TurnRecord
from benchmarks.simulate import Cluster, Costs, System, cluster
from benchmarks.workloads import PRESETS, Arrivals, synthetic
from conserve.placement import (
    NOTHING_SHARED,
    Decoder,
    ElasticPlacement,
    EngineCosts,
    Loads,
    Placement,
    PlacementPolicy,
    Prefiller,
    Shared,
)
from conserve.placement.elastic import home_costs, prefill_cost_s
from tests.unit.benchmarks.simulate.test_elastic import COSTS


def slower(costs: Costs, factor: float) -> Costs:
    """An engine that takes so many times as long."""
    names = ("step_s", "per_sequence_s", "per_kv_token_s", "prefill_s", "per_token_s", "per_pair_s")
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})


class Judged(ElasticPlacement):
    """Holds each choice against the one with exact costs, of the same state."""

    truth: dict[str, EngineCosts]
    excess: list[tuple[float, float]]

    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Decoder],
        prefillers: Iterable[Prefiller],
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        decoders, prefillers = list(decoders), list(prefillers)
        where = (prompt_tokens, decoders, prefillers, shared, now_s)
        chosen = super().place(*where)
        if chosen is not None:
            learned = {id: engine.costs for id, engine in self.loads._engines.items()}
            for id, engine in self.loads._engines.items():
                engine.costs = self.truth[id]
            best = super().place(*where)
            assert best is not None
            excess = self.costs_s(chosen, *where) / self.costs_s(best, *where) - 1
            self.excess.append((now_s, excess))
            for id, engine in self.loads._engines.items():
                engine.costs = learned[id]
        return chosen

    def costs_s(
        self,
        placement: Placement,
        tokens: int,
        decoders: list[Decoder],
        prefillers: list[Prefiller],
        shared: Shared,
        now_s: float,
    ) -> float:
        """What a placement costs all, by the costs that are known at the moment."""
        pool = [one.id for one in prefillers]
        homes = self.homes(decoders, prefillers, now_s)
        work = {id: self.loads.work(id, now_s) for id in (*pool, *(one.id for one in homes))}
        later_s = home_costs(
            tokens, homes, pool, shared, work,
            first=self.loads.first_prompts(now_s),
            shares=self.first_prompts_shares(decoders, pool, now_s),
            occupancy_weight=1.0,
        )  # fmt: skip
        home = work[placement.decoder_id]
        cost_s = later_s[placement.decoder_id]
        if placement.prefiller_id is None:
            return cost_s + prefill_cost_s(home, tokens, 0)
        there_s = prefill_cost_s(work[placement.prefiller_id], tokens, 0)
        return cost_s + there_s + home.costs.handoff_s(tokens)


def excess(
    monkeypatch: pytest.MonkeyPatch,
    prefiller: Costs,
    decoder: Costs,
    prior_error: float = 1.0,
    slows_s: float | None = None,
    rate_per_s: float = 0.3,
) -> list[tuple[float, float]]:
    """By how much choices cost more than with exact costs, and when they were made."""
    truth = {"prefiller-0": prefiller.estimated, "decoder-0": decoder.estimated}

    def make_policy(name: str, *, costs: EngineCosts, **_: object) -> PlacementPolicy:
        policy = Judged(Loads(costs))
        object.__setattr__(policy, "truth", truth)
        object.__setattr__(policy, "excess", judged)
        return policy

    judged: list[tuple[float, float]] = []
    records: list[TurnRecord] = []
    monkeypatch.setattr(cluster, "make_policy", make_policy)
    system = System(
        "s", "elastic", (prefiller,), (decoder,), prior_error=prior_error, queue_timeout_s=600.0
    )
    one = Cluster(system, records.extend)

    def slows(now_s: float, _: object) -> None:
        engine = one.decoders["decoder-0"]
        engine.costs = slower(engine.costs, 2.0)
        truth["decoder-0"] = engine.costs.estimated

    if slows_s is not None:
        one._later(slows_s, slows, None)
    one.run(
        synthetic(
            PRESETS["conserve"],
            conversations=240,
            arrivals=Arrivals("poisson", rate_per_s),
            vocabulary=range(1000, 4000),
        )
    )
    assert all(record.outcome == "completed" for record in records)
    return judged


@pytest.mark.parametrize(
    ("prefiller", "decoder", "prior_error", "slows_s"),
    [
        (COSTS, COSTS, 1.0, None),
        (COSTS, slower(COSTS, 2.0), 1.0, None),
        (slower(COSTS, 2.0), COSTS, 1.0, None),
        (COSTS, COSTS, 1.0, 60.0),
        (COSTS, COSTS, 10.0, None),
        (COSTS, COSTS, 0.1, None),
        (COSTS, slower(COSTS, 2.0), 10.0, None),
    ],
)
def test_after_a_minute_choices_cost_as_much_as_with_exact_costs(
    monkeypatch: pytest.MonkeyPatch,
    prefiller: Costs,
    decoder: Costs,
    prior_error: float,
    slows_s: float | None,
) -> None:
    seen = excess(monkeypatch, prefiller, decoder, prior_error, slows_s)
    learned_s = 60.0 + (slows_s or 0.0)
    later = [cost for at_s, cost in seen if at_s >= learned_s]
    assert len(later) > 50
    assert statistics.fmean(later) < 0.05
