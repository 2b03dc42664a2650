"""Shared prefixes in simulated engines, against a cache that knows every single token."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.capacity.profile import load_profile
from conserve_lab.records import SharedPrefix, TurnRecord
from conserve_lab.simulate import Cluster, System
from conserve_lab.simulate.cluster import opening
from conserve_lab.simulate.engine import EngineTurn
from conserve_lab.simulate.run import NAMES, EngineCounts, make_system, serve
from conserve_lab.simulate.shared import SharedPrefixes
from tests.unit.conserve_lab.simulate.scenes import LoneEngine, Scripted

BLOCK = 4
# Two lengths of tools, and two system prompts after each: none begins at a block.
TOOLS = {1: 18, 2: 9}
SYSTEMS = {11: (1, 43), 12: (1, 30), 21: (2, 25), 22: (2, 41)}

Cell = tuple[object, int]


def parts(system: int, length: int) -> tuple[SharedPrefix, ...]:
    """The first so many tokens of tools and a system prompt."""
    tools, whole = SYSTEMS[system]
    found = [SharedPrefix(tools, min(length, TOOLS[tools]))]
    if length > TOOLS[tools]:
        found.append(SharedPrefix(system, min(length, whole)))
    return tuple(part for part in found if part.tokens)


def cells(prefix: Sequence[SharedPrefix]) -> list[Cell]:
    """Every token of a prefix that whole blocks have, and whose it is."""
    found: list[Cell] = []
    for part in prefix:
        whole = part.tokens // BLOCK * BLOCK
        found += [(part.key, at) for at in range(len(found), whole)]
    return found


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def leading(wanted: Iterable[Cell], here: Iterable[Cell]) -> int:
    """How many of the first cells are here, up to the first that is not."""
    known = set(here)
    count = 0
    for cell in wanted:
        if cell not in known:
            break
        count += 1
    return count


def test_a_turn_that_has_computed_less_takes_nothing_from_what_others_have() -> None:
    shared = SharedPrefixes(BLOCK, {})
    prefix = shared.whole_blocks(parts(11, 40))
    for computed in (40, 20):
        shared.take(prefix)
        shared.computed(prefix, computed)
    assert shared.found(prefix) == 40


class _EveryToken:
    """An engine whose cache is a list of tokens, the longest unused first; it takes prompts alone.

    Who goes first and does not fit is taken to have used what it would find.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.unused: list[Cell] = []
        self.histories: dict[str, list[Cell]] = {}
        self.evicted = 0

    def step(self, waiting: list[EngineTurn]) -> list[int]:
        """Take as many as fit, and end them; says what each of them found."""
        running: list[tuple[EngineTurn, list[Cell], int]] = []
        held: set[Cell] = set()
        computed = set(self.unused)
        while waiting:
            work = waiting[0]
            name, prefix = work.conversation, cells(work.shared)
            mine = prefix + [(name, at) for at in range(len(prefix), work.prompt_tokens + 1)]
            before = leading(self.histories.get(name, ()), computed)
            if len(held | set(mine)) > self.capacity_tokens:
                used = [cell for cell in self.unused if cell[0] == name]
                used += [cell for cell in reversed(prefix) if cell in self.unused]
                self.unused = [cell for cell in self.unused if cell not in used] + used
                break
            waiting.pop(0)
            # Of what a conversation had, what it does not go on with is not kept.
            taken = set(mine) | {cell for cell in self.unused if cell[0] == name}
            self.unused = [cell for cell in self.unused if cell not in taken]
            held |= set(mine)
            while len(held) + len(self.unused) > self.capacity_tokens:
                computed.discard(self.unused.pop(0))
                self.evicted += 1
            running.append((work, mine, whole_blocks(min(before, work.reusable_tokens))))
        found = []
        # One after the other is computed, and finds what those before it have computed.
        for work, _, reused in running:
            prefix = cells(work.shared)
            found.append(max(reused, whole_blocks(leading(prefix, computed))))
            computed |= set(prefix)
        for index, (work, mine, _) in enumerate(running):
            still = {cell for _, others, _ in running[index + 1 :] for cell in others}
            # The ends of histories go first.
            self.unused += [cell for cell in reversed(mine) if cell not in still]
            self.histories[work.conversation] = mine
        return found


turns_of_a_round = st.lists(
    st.tuples(
        st.integers(0, 5),  # Which conversation.
        st.integers(0, 50),  # What of its prompt is that of others.
        st.integers(1, 30),  # What comes after.
        st.integers(0, 80),  # What of it was in the prompt before.
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda one: one[0],
)


@given(st.integers(81, 260), st.lists(turns_of_a_round, min_size=1, max_size=10))
@settings(max_examples=200, deadline=None)
def test_an_engine_finds_and_drops_what_one_that_knows_every_token_does(
    capacity_tokens: int, rounds: list[list[tuple[int, int, int, int]]]
) -> None:
    real = LoneEngine(capacity_tokens, block_tokens=BLOCK)
    brute = _EveryToken(capacity_tokens)
    heads: dict[str, int] = {}
    lengths: dict[str, int] = {}
    for turns in rounds:
        works = []
        for number, shared, after, reused in turns:
            name = f"c{number}"
            system = sorted(SYSTEMS)[number % len(SYSTEMS)]
            head = min(shared, SYSTEMS[system][1])
            before = heads.get(name, 0)
            most = lengths.get(name, 0) if head == before else min(head, before)
            prefix = parts(system, head)
            prompt = head + after
            works.append(EngineTurn(name, prompt, 1, min(reused, most, prompt), shared=prefix))
            heads[name], lengths[name] = head, prompt
        for work in works:
            real.engine.submit(work, real.now_s)
        real.run()
        # The first came alone: the others came while it was computed.
        expected = brute.step(works[:1])
        waiting = works[1:]
        while waiting:
            expected += brute.step(waiting)
        assert [work.cached_tokens for work in works] == expected
        assert real.engine.active_tokens == 0
        assert real.engine.idle_tokens == len(brute.unused)
        assert real.engine.evicted_tokens == brute.evicted


def test_a_preempted_turn_releases_what_it_shares() -> None:
    real = LoneEngine(1_000, block_tokens=BLOCK)
    for name in ("a", "b"):
        real.engine.submit(EngineTurn(name, 440, 300, shared=parts(11, 40)), 0.0)
    real.run()
    assert real.engine.preemptions == 1
    assert real.engine.active_tokens == 0


# --- In a cluster ---------------------------------------------------------------------------------

COMMON = (SharedPrefix(1, 1_000), SharedPrefix(2, 4_000))


def _script(conversation: str, turns: int, gap_s: float) -> Scripted:
    """A conversation that begins with what all begin with, and goes on for so many turns."""
    lengths = [4_000 + 1_120 * number for number in range(1, turns + 1)]
    before = [0, *lengths]
    sizes = [
        (tokens, reused, 32, gap_s if reused else 0.0)
        for tokens, reused in zip(lengths, before, strict=False)
    ]
    return Scripted(sizes, conversation, COMMON)


def _system(name: str, capacity_tokens: int = 50_000, decoders: int = 1) -> System:
    system = make_system(name, load_profile("a40-qwen3-0.6b"), EngineCounts(1, decoders))
    return replace(
        system,
        prefillers=tuple(replace(one, capacity_tokens=50_000) for one in system.prefillers),
        decoders=tuple(replace(one, capacity_tokens=capacity_tokens) for one in system.decoders),
    )


def test_what_prompts_share_is_computed_moved_and_counted_once() -> None:
    records: list[TurnRecord] = []
    cluster = Cluster(_system("conserve"), records.extend)
    plan = [(0.0, _script("first", 2, 60.0)), (0.0, _script("second", 2, 60.0))]
    cluster.run_programs(iter(plan), 2, until_s=30.0, ramp_s=20.0)
    (decoder,), (engine,) = cluster.table.decoders.values(), cluster.decoders.values()
    # Both are between their turns.
    distinct = 4_000 + 2 * (1_120 + 32)
    assert decoder.held_tokens == engine.idle_tokens == distinct
    assert [one.cached_tokens for one in records] == [0, 4_000]
    figures = cluster.figures(1.0)
    assert figures.shared_found_tokens == 4_000
    # Whole chunks of 256: all of one prompt, and what the other one had of its own.
    assert figures.handoff_tokens == 5_120 + 1_120


def test_room_is_asked_for_what_a_decoder_does_not_hold() -> None:
    """Two prompts of 5,120 tokens fit into 6,500 if 4,000 are the same."""
    refused = []
    for shared in (COMMON, ()):
        cluster = Cluster(_system("conserve", 6_500), lambda turns: None)
        for name in ("first", "second"):
            admitted = cluster.table.bind(name, 5_120, 0.0, opening=opening(name, shared, True))
            refused.append(admitted is None)
    assert refused == [False, False, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_every_system_finds_what_conversations_share(name: str) -> None:
    """Many conversations on engines that are short of room: all of it is given back."""
    records: list[TurnRecord] = []
    system = _system(name, 24_000, decoders=2)
    plan = [(0.5 * i, _script(f"c{i}", 4, 2.0)) for i in range(16)]
    cluster = serve(replace(system, queue_timeout_s=600.0), plan, records.extend)
    assert Counter(one.outcome for one in records) == {"completed": 64}
    firsts = [one for one in records if one.turn == 1]
    assert sum((one.cached_tokens or 0) >= 4_000 for one in firsts) >= 8
    found = cluster.figures(1.0).shared_found_tokens
    assert found is not None
    assert found > 20_000
    for engine in (*cluster.prefillers.values(), *cluster.decoders.values()):
        assert engine.active_tokens == 0
        assert engine.idle_tokens <= engine.capacity_tokens
    if isinstance(cluster, Cluster):
        assert {one.held_tokens for one in cluster.table.decoders.values()} == {0}


@pytest.mark.parametrize("gap_s", [0.01, 3.0])
@pytest.mark.parametrize("engines", [2, 3])
def test_siblings_spread_over_engines_and_compute_what_they_share_once(
    engines: int, gap_s: float
) -> None:
    shared = (SharedPrefix(1, 2_048),)
    children = [
        (number * gap_s, Scripted([(2_148, 0, 200, 0.0)], f"child{number}", shared))
        for number in range(8)
    ]
    profile = load_profile("cpu-embedded")
    system = make_system(
        "elastic_parking", profile, EngineCounts(0, engines), host_tokens=1_000_000
    )
    first: list[TurnRecord] = []
    serve(system, children, first.extend)
    assert len({one.server for one in first}) > 1
    computed = sum(one.prompt_tokens - (one.cached_tokens or 0) for one in first)
    assert computed <= 8 * 100 + 1.2 * 2_048
