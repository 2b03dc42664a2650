"""Elastic placement: the least total waiting time."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from hypothesis import assume, example, given
from hypothesis import strategies as st

from conserve.placement import (
    NOTHING_SHARED,
    Decoder,
    ElasticPlacement,
    EngineCosts,
    EngineLoad,
    Loads,
    Placement,
    Prefiller,
    Shared,
)
from conserve.placement.load import wait_s

NOW_S = 100.0
COSTS = EngineCosts(
    per_token_s=1e-3,
    per_pair_s=1e-7,
    prefill_constant_s=0.01,
    prefill_share=0.75,
    handoff_constant_s=0.02,
    handoff_per_token_s=1e-4,
    chunk_tokens=512,
    step_s=0.01,
    per_sequence_s=0.0005,
)
DECODERS, PREFILLERS = ("d1", "d2", "d3"), ("p1", "p2")

LOADS = st.dictionaries(
    st.sampled_from(DECODERS + PREFILLERS),
    st.builds(
        EngineLoad,
        prefill_tokens=st.integers(0, 5_000),
        decodes=st.integers(0, 20),
        step_s=st.floats(0, 0.1),
    ),
)
HOMES = st.lists(
    st.builds(
        Decoder,
        id=st.sampled_from(DECODERS + PREFILLERS),
        capacity_tokens=st.integers(1_000, 20_000),
        held_tokens=st.integers(0, 22_000),
        conversations=st.integers(0, 3),
    ),
    unique_by=lambda one: one.id,
    max_size=5,
)
POOL = st.lists(st.sampled_from(PREFILLERS), unique=True).map(
    lambda ids: [Prefiller(id) for id in ids]
)
SHARED = st.builds(
    Shared,
    tokens=st.dictionaries(st.sampled_from(DECODERS + PREFILLERS), st.integers(1, 3_000)),
    warm_on=st.none() | st.sampled_from(DECODERS + PREFILLERS),
    coming_to=st.none() | st.sampled_from(DECODERS),
    left_on=st.none() | st.sampled_from(DECODERS + PREFILLERS),
    left_tokens=st.integers(0, 3_000),
    parked_tokens=st.sampled_from((0, 0, 500, 2_500)),
)
# Prompts sent before: to which home, and which prefiller.
SENT = st.lists(
    st.tuples(st.sampled_from(DECODERS), st.none() | st.sampled_from(PREFILLERS)), max_size=6
)


def known(said: dict[str, EngineLoad], sent: Sequence[tuple[str, str | None]] = ()) -> Loads:
    """Loads of engines that have reported this, and to which this was sent since."""
    loads = Loads(COSTS)
    for engine_id, load in said.items():
        loads.says(engine_id, load, NOW_S)
    for number, (home, prefiller) in enumerate(sent):
        loads.turn_came(f"before{number}", home, NOW_S - 4 * number)
        loads.placed(f"before{number}", 3_000, Placement(home, prefiller), NOTHING_SHARED, NOW_S)
    return loads


def cost_s(
    tokens: int, home: str, at: str, shared: Shared, loads: Loads, room: dict[str, int]
) -> float:
    """The sum that the policy minimizes, as its description has it."""
    work = loads.work(at, NOW_S)
    there = {id: shared.there(id) for id in (home, at)}
    found = there[at] if at != home else max(there[home], shared.parked_tokens)
    found = min(found, tokens - 1)
    new = tokens - found
    own_s = COSTS.per_token_s * new + COSTS.per_pair_s * ((new + found) ** 2 - found**2)
    if work.decodes:
        wait_s = COSTS.prefill_share * (work.backlog_s + own_s)
        wait_s += math.ceil((work.backlog_tokens + new) / COSTS.chunk_tokens) * work.step_s
    else:
        wait_s = work.backlog_s + own_s + COSTS.prefill_constant_s
    delayed_s = COSTS.prefill_share * work.decodes * own_s + work.coming_wait_s(own_s)
    if at != home and at in room and new > room[at]:
        out = new - room[at]
        again_s = COSTS.per_token_s * out + COSTS.per_pair_s * out**2
        delayed_s += again_s + COSTS.prefill_share * work.decodes * again_s
    moved = tokens - there[home] if at != home else found - there[home]
    way_s = COSTS.handoff_constant_s + COSTS.handoff_per_token_s * moved if moved > 0 else 0.0
    # What another engine has, or is about to have, should not be computed again.
    twice = max(0, max((*shared.tokens.values(), shared.parked_tokens)) - found)
    twice_s = COSTS.per_token_s * twice + COSTS.per_pair_s * ((twice + found) ** 2 - found**2)
    whole_s = wait_s + delayed_s + way_s + 0.5 * twice_s
    if at != home:
        # The home's own prefills may still run when it comes there.
        whole_s += COSTS.prefill_share * max(0.0, loads.work(home, NOW_S).backlog_s - whole_s)
    return whole_s


def test_a_prompt_leaves_a_home_to_which_many_turns_come() -> None:
    loads = Loads(COSTS)
    policy = ElasticPlacement(loads)
    names = [f"c{number}" for number in range(20)]
    for second in range(3):
        for name in names:
            loads.turn_came(name, "d1", NOW_S + second)
    homes, pool = [Decoder("d1", 100_000)], [Prefiller("p1")]
    assert policy.place(2_000, homes, pool, now_s=NOW_S + 3) == Placement("d1", "p1")
    # Two turns a second came lately, but no conversation is left to send another.
    for name in names:
        loads.left(name, "d1")
    assert policy.place(2_000, homes, pool, now_s=NOW_S + 3) == Placement("d1", None)


def room(one: Decoder, loads: Loads) -> int:
    decoding = min(1.0, loads.work(one.id, NOW_S).decodes / max(1, one.conversations))
    return one.capacity_tokens - int(0.1 * decoding * one.capacity_tokens) - one.held_tokens


def room_for_copies(homes: list[Decoder], loads: Loads, pool: set[str]) -> dict[str, int]:
    left = {one.id: one.capacity_tokens - one.held_tokens for one in homes if one.id in pool}
    return {id: max(0, free - loads.work(id, NOW_S).lent_tokens) for id, free in left.items()}


def later_s(
    tokens: dict[str, int],
    homes: list[Decoder],
    loads: Loads,
    shares: dict[bool, float],
    pool: set[str],
) -> dict[str, float]:
    """The seconds of a conversation's decodes and waits, where its prompt has ``tokens`` more."""
    work = {home.id: loads.work(home.id, NOW_S) for home in homes}
    first = loads.first_prompts(NOW_S)
    decodes = sum(each.mean_decodes for each in work.values())
    conversations = sum(each.conversations for each in work.values())
    duty = min(1.0, (decodes + 0.5) / (conversations + 1))
    # It counts for a minute at most, and for twice the mean age of those that live.
    ages_s = sum(each.ages_s for each in work.values())
    life_s = 0.0
    if conversations:
        life_s = min(60.0, 2 * ages_s / conversations)
        life_s = min(life_s, conversations / first.per_s) if first.per_s else life_s
    decoding_s = max(0.5, min(1.0, decodes / max(1, conversations)) * life_s)
    token_s = {}
    for one in homes:
        if one.id in tokens:
            others = max(duty * work[one.id].conversations, work[one.id].mean_decodes)
            each_s = COSTS.step_s + (2 * others + 1) * COSTS.per_sequence_s
            token_s[one.id] = each_s * (
                1 + (one.held_tokens + tokens[one.id]) / one.capacity_tokens
            )
    found = {}
    for id, each_s in token_s.items():
        busy = min(0.95, shares[id in pool])
        decoding = decoding_s * each_s / min(token_s.values()) / (1 - busy)
        rate = sum(each.turns_per_s for each in work.values()) / max(1, conversations)
        waits = shares[id in pool] / first.seconds * wait_s(first.seconds, rate) if busy else 0.0
        found[id] = decoding + life_s * waits / (1 - busy)
    return found


@given(st.integers(1, 4_000), HOMES, POOL, SHARED, LOADS, SENT)
def test_the_choice_costs_least_of_all_pairs(
    tokens: int,
    homes: list[Decoder],
    prefillers: list[Prefiller],
    shared: Shared,
    said: dict[str, EngineLoad],
    sent: list[tuple[str, str | None]],
) -> None:
    loads = known(said, sent)
    pool = {one.id for one in prefillers}
    policy = ElasticPlacement(loads)
    choice = policy.place(tokens, homes, prefillers, shared, NOW_S)
    shares = policy.first_prompts_shares(homes, pool, NOW_S)
    guarded = shares[True] - shares[False] >= 0.8
    open_ = [one for one in homes if not (guarded and one.id in pool)]
    fitting = [
        one
        for one in open_
        if one.conversations == 0 or shared.beyond(tokens, one.id) <= room(one, loads)
    ]
    if not fitting:
        assert choice is None
        return
    new_tokens = {one.id: shared.beyond(tokens, one.id) for one in fitting}
    later = later_s(new_tokens, open_, loads, shares, pool)
    emptiest = min(one.occupancy for one in fitting)
    even = [one.id for one in fitting if one.occupancy <= emptiest + 0.5]
    copies = room_for_copies(homes, loads, pool)
    pairs = {
        (home, at if at != home else None): later[home]
        + cost_s(tokens, home, at, shared, loads, copies)
        for home in even
        for at in (home, *pool)
    }
    assert choice is not None
    chosen = pairs[choice.decoder_id, choice.prefiller_id]
    # Costs are compared in microseconds.
    assert chosen <= min(pairs.values()) + 5e-6


@given(st.integers(1, 4_000), HOMES, POOL, LOADS)
def test_no_prefiller_hosts_while_first_prompts_ask_for_its_time(
    tokens: int, homes: list[Decoder], prefillers: list[Prefiller], said: dict[str, EngineLoad]
) -> None:
    # 60 s and more of recent prefills, and decodes for which they are worth handing over.
    loads = known(said, [("d1", "p1")] * (12 * max(1, len(prefillers)) + 8))
    for _ in range(100):
        loads.says("d1", EngineLoad(decodes=8), NOW_S)
    policy = ElasticPlacement(loads)
    pool = {one.id for one in prefillers}
    # Without a decoder prefillers are all there is.
    assume(any(one.id not in pool for one in homes))
    assume(policy.first_prompts_shares(homes, pool, NOW_S)[True] >= 0.8)
    choice = policy.place(tokens, homes, prefillers, NOTHING_SHARED, NOW_S)
    assert choice is None or choice.decoder_id not in {one.id for one in prefillers}
    # A minute and more later it hosts as ever.
    later = policy.homes(homes, prefillers, NOW_S + 600.0)
    assert {one.id for one in later} == {one.id for one in homes}


@given(st.integers(1, 900), st.lists(st.integers(0, 8_000), min_size=1, max_size=3), POOL)
def test_where_nothing_runs_the_emptiest_computes_its_own(
    tokens: int, held: list[int], prefillers: list[Prefiller]
) -> None:
    homes = [Decoder(id, 10_000, at, 1) for id, at in zip(DECODERS, held, strict=False)]
    choice = ElasticPlacement(Loads(COSTS)).place(tokens, homes, prefillers)
    assert choice is not None
    assert choice.prefiller_id is None
    (home,) = (one for one in homes if one.id == choice.decoder_id)
    assert home.held_tokens == min(held)


def test_running_decodes_send_a_prompt_to_a_prefiller_and_its_queue_sends_it_back() -> None:
    homes, pool = [Decoder("d1", 10_000, 4_000, 4)], [Prefiller("p1")]
    busy = EngineLoad(decodes=4, step_s=0.01)
    policy = ElasticPlacement(known({"d1": busy}))
    assert policy.place(1_000, homes, pool, now_s=NOW_S) == Placement("d1", "p1")
    # As long as all decodes together would wait for it at home, it may wait there itself.
    queued = EngineLoad(prefill_tokens=6_000)
    policy = ElasticPlacement(known({"d1": busy, "p1": queued}))
    assert policy.place(1_000, homes, pool, now_s=NOW_S) == Placement("d1", None)


def test_an_image_that_has_to_be_encoded_leaves_running_decodes_to_a_prefiller() -> None:
    """The same short prompt stays at home without one, or where the node has encoded it."""
    loads = Loads(replace(COSTS, per_encoded_token_s=5e-3))
    loads.says("d1", EngineLoad(decodes=1, step_s=0.01), NOW_S)
    policy, homes = ElasticPlacement(loads), [Decoder("d1", 20_000, 1_000, 1)]
    for encode_tokens, prefiller in ((0, None), (400, "p1")):
        shared = Shared({}, encode_tokens=encode_tokens)
        placement = policy.place(30, homes, [Prefiller("p1")], shared, NOW_S)
        assert placement == Placement("d1", prefiller)


def test_images_whose_kv_is_found_are_not_encoded_again() -> None:
    """A screenshot agent's thirtieth turn has thirty images, and brings one."""
    loads = Loads(replace(COSTS, per_encoded_token_s=5e-3))
    loads.says("d1", EngineLoad(decodes=1, step_s=0.01), NOW_S)
    shared = Shared({"d1": 3_990}, warm_on="d1", encode_tokens=3_000)
    loads.placed("c", 4_000, Placement("d1", None), shared, NOW_S)
    assert loads.work("d1", NOW_S).backlog_s < 0.2


def test_what_waits_to_be_encoded_is_waited_for() -> None:
    loads = Loads(replace(COSTS, per_encoded_token_s=5e-3))
    loads.says("d1", EngineLoad(encode_tokens=400), NOW_S)
    assert loads.work("d1", NOW_S).backlog_s == 400 * 5e-3
    shared = Shared({}, encode_tokens=200)
    loads.placed("c", 1_000, Placement("d1", None), shared, NOW_S)
    added_s = 200 * 5e-3 + COSTS.prefill_s(1_000)
    assert math.isclose(loads.work("d1", NOW_S).backlog_s, 400 * 5e-3 + added_s)


def test_after_any_idle_time_a_prompt_goes_where_its_beginning_is() -> None:
    """One conversation goes on for hours, and no other one comes."""
    homes = [Decoder("d1", 100_000, 6_000, 1), Decoder("d2", 100_000, 5_000, 1)]
    shared = Shared({"d1": 1_900}, warm_on="d1")
    for idle_s in (0, 60, 600, *range(10_000, 60_000, 50)):
        loads = known({}, [("d1", "p1"), ("d2", None)])
        at_s = NOW_S + idle_s
        for engine_id in ("d1", "d2"):
            loads.computed(engine_id, 100, 900, NOW_S)
            loads.turn_came("before0", engine_id, at_s)
            loads.says(engine_id, EngineLoad(decodes=1, step_s=0.01), at_s)
        choice = ElasticPlacement(loads).place(2_000, homes, [Prefiller("p1")], shared, at_s)
        assert choice == Placement("d1", None), idle_s


def test_a_prompt_is_not_handed_to_an_engine_that_is_in_the_middle_of_a_long_one() -> None:
    """An idle prefiller would compute it at once, and its home could not decode it."""
    homes, pool = [Decoder("d1", 100_000), Decoder("p1", 100_000)], [Prefiller("p1")]
    loads = known({})
    loads.placed("long", 15_000, Placement("d1", None), NOTHING_SHARED, NOW_S)
    policy = ElasticPlacement(loads)
    assert policy.place(300, homes, pool, now_s=NOW_S + 3) == Placement("p1", None)
    # Where no prefiller hosts, it is computed there while it would wait anyway.
    assert policy.place(300, homes[:1], pool, now_s=NOW_S + 3) == Placement("d1", "p1")


def test_a_burst_after_silence_spreads_over_both_engines() -> None:
    """Few prompts came in the last minute, which would make conversations look long-lived."""
    homes, pool = [Decoder("d1", 1_000_000), Decoder("p1", 1_000_000)], [Prefiller("p1")]
    loads, went = known({}), []
    for number in range(8):
        now_s = NOW_S + number
        choice = ElasticPlacement(loads).place(3_000, homes, pool, now_s=now_s)
        assert choice is not None
        loads.placed(f"c{number}", 3_000, choice, NOTHING_SHARED, now_s)
        loads.turn_came(f"c{number}", choice.decoder_id, now_s + 0.5)
        went.append(choice.decoder_id)
    assert went.count("p1") >= 2


def test_a_home_is_filled_whose_conversations_are_idle() -> None:
    def has_room_for(tokens: int, decodes: int) -> bool:
        policy = ElasticPlacement(known({"d1": EngineLoad(decodes=decodes)}))
        homes = [Decoder("d1", 10_000, 5_000, 10)]
        return policy.place(tokens, homes, [], now_s=NOW_S) is not None

    most = {
        decodes: max(tokens for tokens in range(3_900, 5_200, 50) if has_room_for(tokens, decodes))
        for decodes in (0, 4, 10, 30)
    }
    assert most == {0: 5_000, 4: 4_600, 10: 4_000, 30: 4_000}


def test_a_prefiller_does_not_lend_what_would_push_its_own_histories_out() -> None:
    homes = [Decoder("d1", 100_000, 4_000, 4), Decoder("p1", 10_000, 5_000, 5)]
    said = {"d1": EngineLoad(decodes=1, step_s=0.01)}

    def prefiller(held_tokens: int, sent: Sequence[tuple[str, str | None]] = ()) -> str | None:
        homes[1].held_tokens = held_tokens
        loads = known(said, sent)
        loads.done("p1", "before0")
        choice = ElasticPlacement(loads).place(1_000, homes, [Prefiller("p1")], now_s=NOW_S)
        assert choice is not None
        assert choice.decoder_id == "d1"
        return choice.prefiller_id

    assert prefiller(9_000) == "p1"
    assert prefiller(9_900) is None
    # What was lent is there yet.
    assert prefiller(6_001) == "p1"
    assert prefiller(6_001 + 900, [("d2", "p1")]) is None


def test_what_first_prompts_ask_of_prefillers_makes_them_slower_homes() -> None:
    homes = [Decoder("d1", 10_000, 5_000, 5), Decoder("p1", 10_000, 0, 1)]
    policy = ElasticPlacement(known({}))
    assert policy.place(500, homes, [Prefiller("p1")], now_s=NOW_S) == Placement("p1", None)
    # A prompt is 3.9 s of prefill: 9 a minute are 0.585 of a prefiller's time.
    loads = known({}, [("d1", "p1")] * 9)
    homes[1].capacity_tokens = 100_000
    busy = ElasticPlacement(loads).place(500, homes, [Prefiller("p1")], now_s=NOW_S)
    assert busy is not None
    assert busy.decoder_id == "d1"


def test_a_history_goes_back_to_what_is_left_of_it_unless_that_is_full() -> None:
    homes = [Decoder("d1", 10_000, 5_000, 5), Decoder("d2", 10_000, 1_000, 1)]
    policy = ElasticPlacement(Loads(COSTS))
    assert policy.place(3_000, homes, []) == Placement("d2", None)
    shared = Shared({}, left_on="d1", left_tokens=2_900)
    assert policy.place(3_000, homes, [], shared) == Placement("d1", None)
    # The rest of it comes from host memory; for a little less of that no home is fuller.
    parked = Shared({}, left_on="d1", left_tokens=2_000, parked_tokens=2_900)
    assert policy.place(3_000, homes, [Prefiller("p")], parked) == Placement("d1", None)
    parked = replace(parked, left_tokens=300)
    assert policy.place(3_000, homes, [Prefiller("p")], parked) == Placement("d2", None)
    homes[0].held_tokens = 6_001
    assert policy.place(3_000, homes, [], shared) == Placement("d2", None)


@given(
    st.integers(1, 4_000),
    st.lists(st.integers(0, 8_000), min_size=3, max_size=3),
    st.dictionaries(st.sampled_from(DECODERS + PREFILLERS), st.integers(1, 30_000)),
    st.floats(0, 1),
)
# Both prefillers are done long before the homes: a tie, but for how sums are rounded.
@example(1, [0, 0, 0], {"d1": 14_498, "d2": 14_498, "d3": 14_498, "p1": 5_329}, 0.8125)
def test_what_engines_have_said_a_second_ago_is_as_good(
    tokens: int, held: list[int], waiting: dict[str, int], ago_s: float
) -> None:
    """They have worked since, at their pace."""
    homes = [Decoder(id, 10_000, at, 1) for id, at in zip(DECODERS, held, strict=True)]
    pool = [Prefiller(id) for id in PREFILLERS]
    costs = EngineCosts(per_token_s=1e-3, step_s=0.01)
    fresh, stale = Loads(costs), Loads(costs)
    for engine_id, left in waiting.items():
        fresh.says(engine_id, EngineLoad(left), NOW_S)
        before = EngineLoad(left + round(1_000 * ago_s))
        stale.says(engine_id, before, NOW_S - round(1_000 * ago_s) / 1_000)
    for engine_id in waiting:
        one, other = fresh.work(engine_id, NOW_S), stale.work(engine_id, NOW_S)
        assert math.isclose(one.backlog_s, other.backlog_s, rel_tol=1e-6)
    chosen = [
        ElasticPlacement(loads).place(tokens, homes, pool, now_s=NOW_S) for loads in (fresh, stale)
    ]
    assert chosen[0] == chosen[1]


def test_a_turn_moves_where_it_waits_for_less_than_its_history_takes_to_load() -> None:
    homes = [Decoder("d1", 10_000), Decoder("d2", 10_000)]
    here = Shared({}, left_on="d1", left_tokens=4_000, parked_tokens=4_000)

    def goes_to(shared: Shared, **said: EngineLoad) -> str:
        costs = ElasticPlacement(known(said)).turn_costs(4_030, homes, shared, NOW_S)
        return min(costs, key=lambda id: costs[id][0])

    assert goes_to(here) == "d1"
    # 4,000 tokens take 0.42 s to load.
    assert goes_to(here, d1=EngineLoad(prefill_tokens=300)) == "d1"
    assert goes_to(here, d1=EngineLoad(prefill_tokens=600)) == "d2"
    # Without a copy in host memory they would take 5.6 s to compute.
    alone = replace(here, parked_tokens=0)
    assert goes_to(alone, d1=EngineLoad(prefill_tokens=600)) == "d1"
    # Where others decode, it decodes more slowly, and holds them up.
    assert goes_to(NOTHING_SHARED, d1=EngineLoad(decodes=4, step_s=0.012)) == "d2"


@given(LOADS, HOMES, SHARED, st.integers(1, 20_000))
def test_no_engine_ends_a_turn_sooner_than_one_that_is_idle_and_has_all_of_it(
    said: dict[str, EngineLoad], homes: list[Decoder], shared: Shared, tokens: int
) -> None:
    idle = Decoder("idle", 10_000)
    shared = replace(shared, left_on="idle", left_tokens=tokens)
    costs = ElasticPlacement(known(said)).turn_costs(tokens, [*homes, idle], shared, NOW_S)
    assert costs["idle"] == min(costs.values())


def test_a_tie_stays_home_and_a_difference_that_is_known_does_not() -> None:
    homes, pool = [Decoder("d1", 100_000, 4_000, 4)], [Prefiller("p1")]

    def prefiller(doubt: float, decodes: int) -> str | None:
        loads = Loads(replace(COSTS, doubt=doubt))
        loads.says("d1", EngineLoad(decodes=decodes, step_s=0.01), NOW_S)
        choice = ElasticPlacement(loads).place(4_000, homes, pool, now_s=NOW_S)
        assert choice is not None
        return choice.prefiller_id

    assert prefiller(0.0, 1) == "p1"
    assert prefiller(0.5, 1) is None
    assert prefiller(0.5, 9) == "p1"


def test_a_background_prompt_goes_where_it_delays_others_least() -> None:
    homes = [Decoder("d1", 50_000), Decoder("d2", 50_000)]
    # Longer to wait for, but nothing there decodes.
    said = {
        "d1": EngineLoad(decodes=2, step_s=0.011),
        "d2": EngineLoad(prefill_tokens=2_000),
    }
    policy = ElasticPlacement(known(said))

    def costs(background: bool) -> dict[str, float]:
        shared = Shared({}, background=background)
        found = policy.turn_costs(1_000, homes, shared, NOW_S)
        return {id: cost_s for id, (cost_s, _) in found.items()}

    for choose in (
        lambda background: min(costs(background), key=costs(background).__getitem__),
        lambda background: (
            policy.place(1_000, homes, [], Shared({}, background=background), NOW_S).decoder_id
        ),  # type: ignore[union-attr]
    ):
        assert [choose(False), choose(True)] == ["d1", "d2"]


def test_a_prompt_goes_where_it_delays_the_background() -> None:
    homes = [Decoder("d1", 50_000), Decoder("d2", 50_000)]
    loads = known({id: EngineLoad(decodes=4, step_s=0.012) for id in ("d1", "d2")})
    for number in range(4):
        for engine_id in ("d1", "d2"):
            background = engine_id == "d2"
            loads.turn_came(f"{engine_id} {number}", engine_id, NOW_S, background)
    policy = ElasticPlacement(loads)
    assert policy.place(1_000, homes, [], now_s=NOW_S) == Placement("d2", None)
    costs = policy.turn_costs(1_000, homes, NOTHING_SHARED, NOW_S)
    assert costs["d2"] < costs["d1"]
    for number in range(4):
        loads.left(f"d2 {number}", "d2")
    assert loads.work("d2", NOW_S).weight == 1


def test_an_engine_that_has_the_adapter_is_preferred_where_that_ends_sooner() -> None:
    """Nothing is assumed of an adapter's load before one was seen."""
    homes = [Decoder(id, 10_000) for id in ("d1", "d2")]
    work = {"d1": EngineLoad(prefill_tokens=300), "d2": EngineLoad()}

    def home(shared: Shared, **loads: EngineLoad) -> str:
        policy = ElasticPlacement(known(work | loads))
        placed = policy.place(200, homes, [], shared, NOW_S)
        assert placed is not None
        costs = policy.turn_costs(200, homes, shared, NOW_S)
        assert placed.decoder_id == min(costs, key=lambda id: costs[id][0])
        return placed.decoder_id

    asks, has_it = Shared({}, adapter="a"), msgspec.structs.replace(work["d1"], adapters=("a",))
    assert home(asks) == home(asks, d1=has_it) == "d2"
    for took_s, best in ((0.1, "d2"), (2.0, "d1")):
        has_loaded = msgspec.structs.replace(has_it, adapter_loads_s=(took_s,))
        assert home(asks, d1=has_loaded) == best
        assert home(NOTHING_SHARED, d1=has_loaded) == "d2"
        assert home(Shared({}, adapter="other"), d1=has_loaded) == "d2"
