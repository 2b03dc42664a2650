"""Nova's evaluation: its systems, and how claims are counted."""

from dataclasses import replace

import pytest

from experiments import nova


@pytest.mark.parametrize("system", nova.SYSTEMS)
def test_every_system_serves_the_same_requests(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nova, "REQUESTS", 40)
    one = nova.run((system, 0.5, 3))
    assert one == nova.run((system, 0.5, 3))
    assert 0 < one.queued_s < one.ttft_s < one.latency_s < one.longest_s
    assert 0 < one.tbt_s <= one.tbt_p99_s
    assert 40 / one.throughput_per_s > nova.draw(0.5, 3)[-1].came_s


def test_a_seeds_requests_differ_by_the_rate_only_in_how_fast_they_come() -> None:
    slow, fast = nova.draw(0.4, 1), nova.draw(0.8, 1)
    assert [one.output_tokens for one in slow] == [one.output_tokens for one in fast]
    assert [one.came_s for one in slow] == pytest.approx([2 * one.came_s for one in fast])
    assert {min(nova.OUTPUT_TOKENS), max(nova.OUTPUT_TOKENS)} <= {one.output_tokens for one in slow}
    assert nova.draw(0.8, 2)[0].came_s != fast[0].came_s


def test_ratios_are_of_the_best_in_the_same_runs() -> None:
    plain = nova.Outcome(nova.NOVA, 0.3, 0, 2.0, 4.0, 1, 1, 1, 1, 1, 1, 1, 0.3)
    found = [
        replace(plain, system=system, seed=seed, latency_s=latency_s)
        for seed, latencies in enumerate(((2.0, 8.0, 4.0), (1.0, 8.0, 16.0)))
        for system, latency_s in zip((nova.NOVA, "a", "b"), latencies, strict=True)
    ]
    # 4 / 2 and 8 / 1.
    assert nova.ratios(found, lambda one: one.latency_s, ["a", "b"]) == {"0.3": pytest.approx(4.0)}


def test_claims_are_in_novas_favour_where_it_is_better() -> None:
    plain = nova.Outcome(nova.NOVA, 0.3, 0, 2.0, 4.0, 1, 1, 1, 1, 1, 1, 1, 0.3)
    worse = {"latency_s": 3.0, "longest_s": 8.0, "tbt_s": 2.0, "batch": 2.0}
    worse |= {"throughput_per_s": 0.2, "ttft_s": 0.5}
    others = [replace(plain, system=name, **worse) for name in nova.SYSTEMS if name != nova.NOVA]
    claimed = list(nova.claims([plain, *others]))
    assert {one.comes_out for one in claimed} == {"1 of 1"}
    turned = [replace(one, system=nova.NOVA) for one in others[:1]]
    turned += [replace(plain, system=name) for name in nova.SYSTEMS if name != nova.NOVA]
    assert {one.comes_out for one in nova.claims(turned)} == {"0 of 1"}
