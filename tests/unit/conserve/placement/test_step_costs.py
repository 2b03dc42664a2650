"""Costs of iterations, learned from those that were taken."""

import math
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.placement import EngineCosts, EngineStepCosts, Step, StepCosts

PRIOR = EngineCosts(
    per_token_s=2e-4,
    per_pair_s=4e-9,
    prefill_constant_s=0.01,
    step_s=0.01,
    per_sequence_s=5e-4,
    per_kv_token_s=1e-8,
    doubt=0.5,
)
CONSTANTS = (
    "per_token_s", "per_pair_s", "prefill_constant_s", "step_s", "per_sequence_s", "per_kv_token_s",
)  # fmt: skip


def true_s(costs: EngineCosts, step: Step) -> float:
    prefill_s = costs.per_token_s * step.new_tokens + costs.per_pair_s * step.pairs
    if not step.decodes:
        return costs.prefill_constant_s + prefill_s
    return costs.decode_s(step.decodes, step.kv_tokens) + costs.prefill_share * prefill_s


def steps(
    costs: EngineCosts, seed: int, number: int, noise: float = 0.1, kinds: str = "dddpm"
) -> list[Step]:
    """Iterations of decodes, of prefills and of both, one in fifty of which is an accident."""
    draw = random.Random(seed)
    taken = []
    for _ in range(number):
        kind = draw.choice(kinds)
        decodes = 0 if kind == "p" else draw.randint(1, 12)
        kv_tokens = decodes * draw.randint(500, 20_000)
        tokens = 0 if kind == "d" else 16 + int(draw.expovariate(1 / 1_200))
        pairs = tokens * (tokens + 2 * draw.choice((0, 0, draw.randint(0, 30_000))))
        step = Step(1.0, tokens, pairs, decodes, kv_tokens)
        off = math.exp(draw.gauss(0, noise)) * (10 if draw.random() < 0.02 else 1)
        taken.append(Step(off * true_s(costs, step), tokens, pairs, decodes, kv_tokens))
    return taken


def test_an_images_time_is_found_beside_other_work_and_disturbs_nothing() -> None:
    costs = replace(PRIOR, per_encoded_token_s=2e-3)
    kind, plain = StepCosts(PRIOR), StepCosts(PRIOR)
    model, without = EngineStepCosts(kind), EngineStepCosts(plain)
    for number, step in enumerate(steps(costs, 3, 400)):
        model.add(step)
        without.add(step)
        if number % 7 == 0 and step.new_tokens:
            # One in ten is an accident.
            off_s = 2.0 if number % 70 == 0 else 0.0
            lasted_s = step.lasted_s + costs.encode_s(64) + off_s
            model.add(replace_step(step, lasted_s, 64))
    assert kind.costs().per_encoded_token_s == pytest.approx(2e-3, rel=0.3)
    assert replace(kind.costs(), per_encoded_token_s=0.0) == plain.costs()
    # An engine that is slower than others of its kind encodes slower, too.
    slow = replace(kind.costs().times(2.0))
    assert slow.encode_s(64) == pytest.approx(2 * kind.costs().encode_s(64))


def test_before_any_image_was_seen_the_prior_counts_at_the_engines_speed() -> None:
    prior = replace(PRIOR, per_encoded_token_s=1e-3)
    kind = StepCosts(prior)
    for step in steps(PRIOR.times(2.0), 5, 300, kinds="p"):
        kind.add(step)
    assert kind.costs().per_encoded_token_s == pytest.approx(2e-3, rel=0.3)


def replace_step(step: Step, lasted_s: float, encoded_tokens: int) -> Step:
    return msgspec.structs.replace(step, lasted_s=lasted_s, encoded_tokens=encoded_tokens)


def wrong(costs: EngineCosts, other: EngineCosts) -> float:
    """The largest error for usual work, as a factor."""
    usual = [
        Step(1.0, tokens, tokens * (tokens + 2 * before))
        for tokens, before in ((100, 0), (1_000, 0), (8_000, 0), (500, 20_000))
    ]
    usual += [Step(1.0, decodes=4, kv_tokens=20_000), Step(1.0, decodes=10, kv_tokens=90_000)]
    return max(abs(math.log(true_s(costs, one) / true_s(other, one))) for one in usual)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries({name: st.floats(0.4, 2.5) for name in CONSTANTS}),
    st.floats(0.5, 1.0),
    st.sampled_from((0.1, 1.0, 10.0)),
    st.integers(0, 999),
)
def test_constants_are_found_in_noisy_mixed_steps_whatever_was_believed(
    off: dict[str, float], share: float, believed: float, seed: int
) -> None:
    true = {name: factor * getattr(PRIOR, name) for name, factor in off.items()}
    costs = replace(PRIOR, prefill_share=share, **true)
    model = StepCosts(PRIOR.times(believed))
    for step in steps(costs, seed, 600):
        model.add(step)
    found = model.costs()
    assert wrong(found, costs) < math.log(1.4)
    assert found.prefill_share == pytest.approx(share, abs=0.2)
    assert found.doubt < 0.1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from((0.1, 1.0, 10.0)), st.integers(0, 999))
def test_a_prior_that_is_wrong_by_ten_is_right_after_a_minute(believed: float, seed: int) -> None:
    model = EngineStepCosts(StepCosts(PRIOR.times(believed)))
    for step in steps(PRIOR, seed, 150):
        model.add(step)
    assert wrong(model.costs(), PRIOR) < math.log(1.7)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from((0.5, 2.0)), st.integers(0, 999))
def test_an_engine_that_changes_its_pace_is_followed_and_others_of_its_kind_are_not_taken_for_it(
    factor: float, seed: int
) -> None:
    kind = StepCosts(PRIOR)
    one, other = EngineStepCosts(kind), EngineStepCosts(kind)
    for step in steps(PRIOR, seed, 200):
        one.add(step)
    for step in steps(PRIOR, seed + 1, 200):
        other.add(step)
    for step in steps(PRIOR.times(factor), seed + 2, 200):
        one.add(step)
    assert wrong(one.costs(), PRIOR.times(factor)) < math.log(1.7)
    assert wrong(other.costs(), PRIOR) < math.log(1.7)


def test_silence_and_what_took_no_time_change_nothing() -> None:
    model = EngineStepCosts(StepCosts(PRIOR))
    assert model.costs() == PRIOR
    for step in steps(PRIOR, 1, 50):
        model.add(step)
    before = model.costs()
    model.add(Step(0.0, 500, 250_000))
    assert model.costs() == before


def test_no_constant_is_negative_whatever_is_seen() -> None:
    model = EngineStepCosts(StepCosts(PRIOR))
    for step in (Step(2.0, 100, 10_000), Step(0.001, 9_000, 81_000_000), Step(9.0, 10, 100)):
        model.add(step)
        model.add(Step(step.lasted_s, decodes=step.new_tokens))
        costs = model.costs()
        assert min(getattr(costs, name) for name in CONSTANTS) >= 0


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_what_is_noisy_is_doubted(noise: float) -> None:
    model = EngineStepCosts(StepCosts(PRIOR))
    for step in steps(PRIOR, 3, 400, noise, "p"):
        model.add(step)
    assert 0.3 * noise < model.costs().doubt < 1.2 * noise
