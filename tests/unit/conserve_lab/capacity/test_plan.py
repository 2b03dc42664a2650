import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.capacity.profile import Profile, ProfileError, load_profile
from conserve_lab.capacity.demand import Demand, PlannedTurn, measure_demand
from conserve_lab.capacity.plan import PlanError, RoleProfiles, conversation_cost, make_plan
from conserve_lab.cli.plan import planned_turns
from conserve_lab.simulate.run import EngineCounts, make_system, serve
from conserve_lab.workloads import PRESETS, Arrivals, synthetic

A40 = load_profile("a40-qwen3-0.6b")
PROFILES = RoleProfiles(A40, A40)


def conversation(
    first: int = 15_000, append: int = 300, output: int = 100, turns: int = 10, gap_s: float = 1.5
) -> list[PlannedTurn]:
    planned = [PlannedTurn(first, 0, output)]
    held = first + output
    for _ in range(turns - 1):
        planned.append(PlannedTurn(append, held, output, gap_s))
        held += append + output
    return planned


def one_turn_of(first: int, output: int) -> Demand:
    return measure_demand([[PlannedTurn(first, 0, output)]])


demands = st.builds(
    lambda several: measure_demand([conversation(*parts) for parts in several]),
    st.lists(
        st.tuples(
            st.integers(1, 30_000),
            st.integers(1, 2_000),
            st.integers(1, 600),
            st.integers(1, 30),
            st.floats(0, 100),
        ),
        min_size=1,
        max_size=5,
    ),
)


@settings(max_examples=40, deadline=None)
@given(
    demand=demands,
    rate_per_s=st.floats(0.01, 50),
    headroom=st.floats(0, 1),
    provision=st.sampled_from(["saturation", "rate"]),
)
def test_n_satisfies_both_inequalities_and_one_fewer_does_not(
    demand: Demand, rate_per_s: float, headroom: float, provision: str
) -> None:
    plan = make_plan(demand, PROFILES, rate_per_s, headroom=headroom, provision=provision)  # type: ignore[arg-type]
    # From the paper's letters, and nothing of the plan's own arithmetic.
    rate = (1 + headroom) * plan.provisioned_per_s
    one = plan.cost

    def satisfied(decoders: int) -> bool:
        throughput = decoders * one.decoder_tokens_per_s
        enough = throughput >= rate * demand.decoder_tokens * (1 - 1e-9)
        return enough and decoders * one.slots >= rate * one.lifetime_s * (1 - 1e-9)

    assert satisfied(plan.decoders)
    assert plan.decoders == 1 or not satisfied(plan.decoders - 1)
    assert plan.prefillers * one.prefill_tokens_per_s >= rate_per_s * demand.first_tokens


@settings(max_examples=20, deadline=None)
@given(demand=demands, rate_per_s=st.floats(0.01, 20))
def test_decoders_are_counted_for_the_rate_at_which_the_prefillers_saturate(
    demand: Demand, rate_per_s: float
) -> None:
    plan = make_plan(demand, PROFILES, rate_per_s)
    assert plan.provisioned_per_s == pytest.approx(
        plan.prefillers * plan.cost.prefill_tokens_per_s / demand.first_tokens
    )
    assert plan.provisioned_per_s >= rate_per_s


def test_the_papers_own_check() -> None:
    """Section 5.1: 15k input and 1k output need at least 1.67 decoders; three were taken."""
    demand = one_turn_of(15_000, 1_000)
    plan = make_plan(demand, PROFILES, 1.634, headroom=0, prefill_headroom=0)
    assert plan.prefillers == 1
    assert plan.cost.saturation_per_s == pytest.approx(25 / 15, rel=1e-3)
    assert plan.needed_throughput == pytest.approx(1.67, rel=0.03)
    assert make_plan(demand, PROFILES, 1.634, prefill_headroom=0).decoders == 3


def test_what_a_conversation_costs_is_the_sum_over_its_turns() -> None:
    turns = conversation(8_000, 500, 50, 4, 2.0)
    one = conversation_cost(measure_demand([turns]), PROFILES)
    first, *later = turns
    assert one.prefill_s == pytest.approx(A40.prefill.seconds(first.new_tokens))
    peak = later[-1].new_tokens + later[-1].cached_tokens + 50
    assert one.slots == A40.kv_capacity_tokens // peak
    reads = sum(50 * (t.new_tokens + t.cached_tokens + 25) for t in turns)
    tbt_s = A40.decode.step_s(one.slots, one.slots * reads / 200)
    assert one.tbt_s == pytest.approx(tbt_s)
    appends_s = sum(A40.prefill.marginal_s(t.new_tokens, t.cached_tokens) for t in later)
    assert one.decoder_s == pytest.approx(200 * tbt_s / one.slots + appends_s)
    lifetime_s = 6.0 + one.prefill_s + A40.handoff.seconds(8_000) + appends_s + 200 * tbt_s
    assert one.lifetime_s == pytest.approx(lifetime_s)


def test_means_are_over_conversations() -> None:
    demand = measure_demand([conversation(1_000, turns=1), conversation(3_000, turns=3)])
    assert demand.first_tokens == 2_000
    assert demand.first_squared == 5_000_000
    assert demand.turns == 2
    assert demand.append_tokens == 300
    assert demand.output_tokens == 200
    assert demand.longest_peak_tokens == 3_000 + 2 * 300 + 3 * 100


def test_slow_tools_make_memory_the_constraint_and_fast_ones_throughput() -> None:
    slow = make_plan(measure_demand([conversation(gap_s=60)]), PROFILES, 1)
    fast = make_plan(measure_demand([conversation(gap_s=0)]), PROFILES, 1)
    assert slow.binding == "memory"
    assert slow.decoders > fast.decoders
    tiny = dataclasses.replace(PROFILES, decoder=_with(kv_capacity_tokens=100_000_000))
    assert make_plan(measure_demand([conversation(gap_s=60)]), tiny, 1).binding == "throughput"


def _with(**changes: object) -> Profile:
    return A40.model_copy(update=changes)


def test_a_heavy_tail_is_told_and_so_is_what_it_does_to_n() -> None:
    heavy = measure_demand([conversation(first=2_000, append=2_500, turns=11)])
    plan = make_plan(heavy, PROFILES, 5)
    (said,) = plan.assumptions_broken
    assert "carry 93% of the new input tokens" in said
    light = conversation_cost(heavy, PROFILES, with_appends=False)
    rate = 1.2 * plan.provisioned_per_s
    without = math.ceil(max(rate * light.decoder_s, rate * light.lifetime_s / light.slots))
    assert f"N is {plan.decoders} instead of the {without} " in said
    assert without < plan.decoders
    assert make_plan(measure_demand([conversation()]), PROFILES, 5).assumptions_broken == ()


def test_conversations_that_mostly_wait_are_told_and_so_is_what_that_costs() -> None:
    patient = measure_demand([conversation(gap_s=300)])
    plan = make_plan(patient, PROFILES, 1)
    (said,) = plan.assumptions_broken
    assert "during 99% of their lives" in said
    work_alone = math.ceil(plan.needed_throughput)
    assert f"asks for {plan.decoders} decoders, their work for {work_alone}." in said


def test_a_conversation_that_no_decoder_holds_is_one_clear_line() -> None:
    demand = measure_demand([conversation(), conversation(first=310_000, turns=1)])
    with pytest.raises(PlanError, match=r"holds 310,100 tokens .* room for 300,000") as refused:
        make_plan(demand, PROFILES, 1)
    assert "\n" not in str(refused.value)


def test_capped_decoders_draw_less_and_appends_take_longer() -> None:
    demand = measure_demand([conversation()])
    full = make_plan(demand, PROFILES, 1.5)
    capped = make_plan(demand, dataclasses.replace(PROFILES, decoder_cap_w=200), 1.5)
    assert full.watts is not None
    assert capped.watts is not None
    assert capped.watts < full.watts
    assert capped.cost.tbt_s == full.cost.tbt_s
    assert capped.cost.decoder_s > full.cost.decoder_s
    assert capped.joules_per_conversation == pytest.approx(capped.watts / 1.5)
    with pytest.raises(ProfileError, match="no cap of 100 W"):
        make_plan(demand, dataclasses.replace(PROFILES, decoder_cap_w=100), 1.5)
    no_power = RoleProfiles(_with(power=()), A40)
    assert make_plan(demand, no_power, 1.5).watts is None


@pytest.mark.parametrize(("rate_per_s", "headroom"), [(1.5, 0.2), (7.5, 0.2), (3.0, 1.0)])
def test_utilisation_of_decoders_is_what_the_simulator_sees(
    rate_per_s: float, headroom: float
) -> None:
    """Batches are small at these rates: full ones would make it half of that."""
    count = 600
    workload = synthetic(
        PRESETS["conserve"],
        conversations=count,
        arrivals=Arrivals("poisson", rate_per_s),
        vocabulary=range(2),
    )
    demand = measure_demand(planned_turns(workload))
    plan = make_plan(demand, PROFILES, rate_per_s, headroom=headroom)
    engines = EngineCounts(plan.prefillers, plan.decoders)
    cluster = serve(make_system("conserve", A40, engines), workload, lambda turns: None)
    # Over the time in which they came: what is missing at its beginning is there at its end.
    busy_s = sum(e.busy_prefill_s + e.busy_decode_s for e in cluster.decoders.values())
    seen = busy_s / plan.decoders / (count / rate_per_s)
    assert plan.decoder_utilisation == pytest.approx(seen, rel=0.2)
    assert rate_per_s * plan.cost.decoder_s / plan.decoders < 0.65 * seen


@settings(max_examples=40, deadline=None)
@given(demand=demands, rate_per_s=st.floats(0.01, 50), headroom=st.floats(0, 1))
def test_utilisation_is_a_share_and_no_less_than_in_full_batches(
    demand: Demand, rate_per_s: float, headroom: float
) -> None:
    plan = make_plan(demand, PROFILES, rate_per_s, headroom=headroom)
    assert 0 < plan.decoder_utilisation <= 1
    few = make_plan(demand, PROFILES, rate_per_s / 100, headroom=headroom, provision="rate")
    # Alone on its decoder a conversation shares no step, and overlaps with nobody.
    lone_s = A40.decode.step_s(1, demand.mean_context_tokens)
    share = few.rate_per_s * (demand.output_tokens * lone_s + few.cost.appends_s)
    if share * few.cost.lifetime_s < 0.01 * few.decoders:
        assert few.decoder_utilisation == pytest.approx(share / few.decoders, rel=0.02)


def test_watts_are_the_roles_busy_and_idle_shares() -> None:
    plan = make_plan(measure_demand([conversation()]), PROFILES, 1.5)
    busy, some = plan.prefiller_utilisation, plan.decoder_utilisation
    expected = plan.prefillers * (300 * busy + 30 * (1 - busy))
    expected += plan.decoders * (300 * some + 30 * (1 - some))
    assert plan.watts == pytest.approx(expected)


@pytest.mark.parametrize(("headroom", "least", "most"), [(0.0, 0.05, 0.6), (1.0, 0.0, 1e-6)])
def test_overflow_is_the_poisson_tail_beyond_the_slots(
    headroom: float, least: float, most: float
) -> None:
    demand = measure_demand([conversation(gap_s=10)])
    plan = make_plan(demand, PROFILES, 2.0, headroom=headroom, provision="rate")
    mean, slots = 2.0 * plan.cost.lifetime_s, plan.decoders * plan.cost.slots
    term = math.exp(-mean)
    below = 0.0
    for count in range(slots + 1):
        below += term
        term *= mean / (count + 1)
    assert plan.overflow_share == pytest.approx(1 - below, abs=1e-9)
    assert least <= plan.overflow_share <= most
