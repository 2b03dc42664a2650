"""One GPU that serves images in three stages, and the policy that it asks."""

import random
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from statistics import fmean

import pytest

from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.stage_costs import (
    A6000_COGAGENT,
    COGAGENT_TOWER,
    NOVA_SHARES,
    queueing_s,
    static_shares,
)
from benchmarks.simulate.inside.stages import (
    ChunkedPrefill,
    PrefillFirst,
    Request,
    Server,
    StageServer,
)
from conserve.engine_scheduling import DecodeShare, PrefillLane, Stage, Stages

COSTS = A6000_COGAGENT


def staged(shares: Mapping[Stage, DecodeShare] | None = NOVA_SHARES) -> StageServer:
    return StageServer(Loop(), COSTS, Stages(PrefillLane(), shares))


SERVERS: dict[str, Callable[[], Server]] = {
    "nova": staged,
    "static": lambda: staged(static_shares(24, 30)),
    "multi-stream": lambda: staged(None),
    "prefill first": lambda: PrefillFirst(Loop(), COSTS),
    "chunked": lambda: ChunkedPrefill(Loop(), COSTS),
}


def drawn(
    count: int, rate_per_s: float, outputs: tuple[int, int] = (30, 80), seed: int = 0
) -> list[Request]:
    chance = random.Random(seed)
    came_s = accumulate(chance.expovariate(rate_per_s) for _ in range(count))
    tokens = COSTS.prompt_tokens
    return [
        Request(f"r{number}", tokens, chance.randint(*outputs), came_s=at_s)
        for number, at_s in enumerate(came_s)
    ]


def passes(requests: list[Request]) -> list[tuple[float, float]]:
    return sorted(one for request in requests for one in (request.encode, request.prefill))


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("rate_per_s", [0.3, 0.8, 5.0])
def test_every_request_ends_once_with_its_tokens(name: str, rate_per_s: float) -> None:
    requests = drawn(80, rate_per_s)
    server = SERVERS[name]()
    server.serve(requests)
    assert sorted(one.key for one in server.ended) == sorted(one.key for one in requests)
    assert not server.decoding
    for one in requests:
        assert one.made_tokens == one.output_tokens == len(one.gaps_s) + 1
        assert one.came_s <= one.encode[0] < one.encode[1] <= one.prefill[0] < one.prefill[1]
        assert one.first_token_s == one.prefill[1]
        assert one.last_token_s == pytest.approx(one.first_token_s + sum(one.gaps_s))
    # A step gives each of its requests one token, and a prefill the first.
    assert sum(server.batches) == sum(one.output_tokens - 1 for one in requests)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("rate_per_s", [0.3, 0.8, 5.0])
def test_decodes_never_run_beside_two_other_stages(name: str, rate_per_s: float) -> None:
    requests = drawn(80, rate_per_s)
    SERVERS[name]().serve(requests)
    for (_, ended_s), (began_s, _) in pairwise(passes(requests)):
        assert began_s >= ended_s - 1e-9
    # First come, first served.
    encodes = [one.encode for one in requests]
    assert encodes == sorted(encodes)


def test_a_burst_by_hand() -> None:
    requests = [Request(f"r{number}", COSTS.prompt_tokens, 1_000) for number in range(4)]
    staged().serve(requests)
    alone_s = COSTS.encode_s, COSTS.prefill_s
    # Nothing decodes yet, so the first has all SMs.
    assert requests[0].service_s == pytest.approx(sum(alone_s))
    # Decodes have 24 - 2 x 4 beside the second one's encode (three are pending), 30 - 2 x 6 beside
    # its prefill; then 20 and 24, and 24 and 30.
    for request, (encode_sms, prefill_sms) in zip(
        requests[1:], [(16, 18), (20, 24), (24, 30)], strict=True
    ):
        beside = [84 / (84 - encode_sms), 84 / (84 - prefill_sms)]
        expected_s = sum(COSTS.beside * s * times for s, times in zip(alone_s, beside, strict=True))
        assert request.service_s == pytest.approx(expected_s, rel=2e-3)
    # The first one's steps beside the second one's encode.
    assert requests[0].gaps_s[0] == pytest.approx(0.0289 * COSTS.beside * 24 / 16, rel=2e-3)
    # All decode, and the lane is empty.
    assert requests[0].gaps_s[-1] == pytest.approx(0.0289 + 3 * COSTS.per_decode_s)


def test_the_policy_that_engines_run_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(server: Server) -> list[tuple[str, float]]:
        server.serve(drawn(100, 0.5))
        return [(one.key, one.last_token_s) for one in server.ended]

    nova, static = ends(staged()), ends(staged(static_shares(12, 12)))
    assert nova != static
    with monkeypatch.context() as patched:
        patched.setattr(DecodeShare, "decode_sms", lambda share, pending: share.least_sms)
        assert ends(staged()) == static
    with monkeypatch.context() as patched:

        def newest_first(stages: Stages) -> str | None:
            return next(reversed(stages.waiting), None) if stages.current is None else None

        patched.setattr(Stages, "next_encode", newest_first)
        requests = drawn(100, 0.8)
        staged().serve(requests)
        encodes = [one.encode for one in requests]
        assert encodes != sorted(encodes)


def test_answers_of_one_token_wait_as_equation_6_says() -> None:
    # Nothing ever decodes, so all encodes and prefills take the same time.
    requests = drawn(20_000, 0.5, outputs=(1, 1))
    staged().serve(requests)
    service_s = COSTS.encode_s + COSTS.prefill_s
    assert all(one.service_s == pytest.approx(service_s) for one in requests)
    waited_s = fmean(one.queued_s for one in requests)
    assert waited_s == pytest.approx(queueing_s(0.5, service_s, service_s**2), rel=0.05)


def test_at_low_load_the_queue_is_that_of_equation_6() -> None:
    requests = drawn(4_000, 0.15)
    staged().serve(requests)
    services_s = [one.service_s for one in requests]
    assert max(services_s) > 1.2 * min(services_s)
    expected_s = queueing_s(0.15, fmean(services_s), fmean(s**2 for s in services_s))
    assert fmean(one.queued_s for one in requests) == pytest.approx(expected_s, rel=0.1)


def test_a_queue_that_only_grows_is_infinite() -> None:
    assert queueing_s(0.8, 1.35, 1.35**2) == float("inf")
    # Table V, by its own figures.
    assert queueing_s(0.3, 1.39, 1.39**2) == pytest.approx(0.51, abs=0.02)


def test_prefill_first_decodes_when_more_than_its_threshold_wait() -> None:
    requests = [Request(f"r{number}", COSTS.prompt_tokens, 40) for number in range(20)]
    server = PrefillFirst(Loop(), COSTS)
    server.serve(requests)
    service_s = COSTS.encode_s + COSTS.prefill_s
    # Six are prefilled one after the other, and the first of them has waited for all.
    assert requests[5].first_token_s == pytest.approx(6 * service_s)
    assert requests[0].gaps_s[0] == pytest.approx(5 * service_s + COSTS.step_s(6))
    assert max(server.batches) == 6
    # Once nothing else waits, the last decode in ever smaller batches.
    assert server.batches[-1] < 6


def test_chunks_are_as_long_as_what_decodes_leave_of_the_budget() -> None:
    chat = Request("chat", COSTS.prompt_tokens, 1_000)
    late = Request("late", COSTS.prompt_tokens, 2, came_s=5.0)
    ChunkedPrefill(Loop(), COSTS).serve([chat, late])
    # 14 chunks of 128 tokens, each of which hides behind reading the weights.
    assert chat.first_token_s == pytest.approx(COSTS.encode_s + 14 * COSTS.decode_s)
    # One decode leaves 127 tokens: as many chunks, and the decode waits for the encode.
    assert late.prefill[1] - late.prefill[0] == pytest.approx(14 * COSTS.decode_s)
    assert max(chat.gaps_s) == pytest.approx(COSTS.encode_s + COSTS.decode_s)
    bare = ChunkedPrefill(Loop(), COSTS, hidden=0.0)
    alone = Request("alone", COSTS.prompt_tokens, 1)
    bare.serve([alone])
    assert alone.service_s == pytest.approx(COSTS.encode_s + COSTS.prefill_s + 14 * COSTS.decode_s)


def test_streams_that_share_all_sms_take_what_table_4_says() -> None:
    # 2,000 and 200 kernels, which take 699.8 and 588.3 ms alone.
    encode_s = 0.5883 / COSTS.shared_pass
    left_s = 0.6998 - encode_s * COSTS.shared_step
    assert (encode_s, encode_s + left_s) == (pytest.approx(0.6806), pytest.approx(1.2418))
    assert COSTS.pass_s("encode", None) == pytest.approx(0.8068 / COSTS.shared_pass)
    assert COSTS.step_s(1, "encode", None) == pytest.approx(0.0289 / COSTS.shared_step)


def test_the_profile_gives_the_papers_shares_and_its_bound() -> None:
    assert {"encode": DecodeShare(24, 12, 4), "prefill": DecodeShare(30, 12, 6)} == NOVA_SHARES
    longest_s = {
        sms: max(COSTS.step_s(10, "encode", sms), COSTS.step_s(10, "prefill", sms))
        for sms in COSTS.sizes
    }
    # With ten decodes, too, and beside other passes.
    assert min(sms for sms, took_s in longest_s.items() if took_s <= 0.08) == 12
    assert COSTS.step_s(3, "encode", 30) == pytest.approx(COSTS.step_s(3) * COSTS.beside)


@pytest.mark.parametrize(
    ("kept", "published_mib"), [(2, 692.1), (3, 821.6), (4, 951.1), (5, 1080.7), (63, 8595.2)]
)
def test_layers_that_stay_take_the_papers_memory(kept: int, published_mib: float) -> None:
    assert COGAGENT_TOWER.kept_bytes(kept) / 2**20 == pytest.approx(published_mib, abs=0.1)
    assert COGAGENT_TOWER.kept_bytes(100) == COGAGENT_TOWER.kept_bytes(63)
