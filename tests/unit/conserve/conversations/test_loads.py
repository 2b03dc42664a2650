"""The table's reports to its policy on engines' work, and the policy's use of them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.pausing import Pausing
from conserve.placement import ElasticPlacement, EngineCosts, EngineLoad, Loads, Placement, Shared
from tests.unit.conserve.conversations.scene import Turn, a_table, chain, start, stats, the

# A token takes a millisecond; to hand over however many, as long as two hundred.
COSTS = EngineCosts(per_token_s=1e-3, handoff_constant_s=0.2)
BUSY = EngineLoad(decodes=9, step_s=0.01)


def elastic_table(hosts: bool = False, pausing: Pausing | None = None) -> ConversationTable:
    policy = ElasticPlacement(Loads(COSTS))
    table = a_table(decoders=1, capacity_tokens=10_000, policy=policy, pausing=pausing)
    if hosts:
        table.add_decoder("p1", 10_000)
    return table


def loads_of(table: ConversationTable) -> Loads:
    assert table.loads is not None
    return table.loads


def backlog(table: ConversationTable, engine_id: str, now_s: float) -> float:
    return loads_of(table).work(engine_id, now_s).backlog_tokens


def test_what_is_sent_counts_where_it_was_sent_until_its_prefill_is_over() -> None:
    table = elastic_table()
    table.engine_says("d1", BUSY, 0.0)
    first = start(table, "a", 800)
    assert the(table, "a").prefiller_id == "p1"
    assert (backlog(table, "p1", 0.0), backlog(table, "d1", 0.0)) == (800, 0)
    table.prefilled(first.key)
    assert backlog(table, "p1", 0.0) == 0
    table.engine_says("d1", EngineLoad(), 0.0)
    here = start(table, "b", 700)
    assert the(table, "b").prefiller_id is None
    assert backlog(table, "d1", 0.0) == 700
    assert here.advance(table, 700)
    assert backlog(table, "d1", 0.0) == 0


def test_an_answer_a_cut_turn_and_an_end_say_that_a_prefill_is_over() -> None:
    table = elastic_table()
    for name, over in (
        ("answered", lambda turn: table.answered(turn.key, 0.1)),
        ("cut", lambda turn: turn.abandon(table)),
        ("lost", lambda turn: table.release(turn.history_id)),
    ):
        # A decoder's own; then a prefiller's, where the decoder is busy.
        for engine_id in ("d1", "p1"):
            table.engine_says("d1", EngineLoad() if engine_id == "d1" else BUSY, 0.0)
            turn = start(table, f"{name} {engine_id}", 100)
            assert backlog(table, engine_id, 0.0) == 100
            over(turn)
            if (name, engine_id) not in (("answered", "p1"), ("lost", "d1")):
                assert backlog(table, engine_id, 0.0) == 0, name
            table.release(turn.history_id)
            loads_of(table).says(engine_id, EngineLoad(), 0.0)


def test_later_turns_count_as_work_of_their_decoder() -> None:
    table = elastic_table()
    start(table, "a", 800).advance(table, 800)
    before = loads_of(table).work("d1", 0.0)
    later = start(table, "a")
    assert loads_of(table).work("d1", 0.0).turns_per_s > before.turns_per_s
    assert table.advance(later.key, "d1", stats(1_700), (), 0.0)
    after = loads_of(table).work("d1", 0.0)
    assert after.append_share > before.append_share


def test_turns_that_the_decoder_began_by_itself_count_too() -> None:
    table = elastic_table(hosts=True)
    turn = start(table, "a", 800)
    turn.advance(table, 800)
    before = loads_of(table).work("d1", 0.0)
    began = turn.key._replace(turn_id=turn.key.turn_id + 1)
    assert not table.began(began, "p1", 0.0)
    assert table.began(began, "d1", 0.0)
    assert loads_of(table).work("d1", 0.0).turns_per_s > before.turns_per_s


def test_who_ends_or_is_unbound_sends_no_turn_there() -> None:
    table = elastic_table()
    turns = [start(table, name, 100) for name in ("a", "b")]
    for turn in turns:
        turn.advance(table, 100)
    assert loads_of(table).work("d1", 0.0).conversations == 2
    table.release(turns[0].history_id)
    assert loads_of(table).work("d1", 0.0).conversations == 1
    # The decoder goes, and what is idle there is bound nowhere.
    table.leave("d1")
    table.evict("d1")
    assert loads_of(table).work("d1", 0.0).conversations == 0


def test_nothing_is_known_or_heard_of_an_engine_that_is_gone() -> None:
    table = elastic_table(hosts=True)
    for engine_id in ("d1", "p1"):
        table.engine_says(engine_id, BUSY, 0.0)
    table.remove_engine("p1")
    table.remove_engine("p1")
    table.engine_says("p1", BUSY, 1.0)
    assert loads_of(table).work("p1", 1.0).decodes == 0
    # It was the only one to help.
    assert table.bind("a", 800, 1.0) == Placement("d1", None)
    table.leave("d1")
    assert table.bind("b", 800, 1.0) is None


def test_a_prefiller_hosts_and_later_turns_find_their_conversation_there() -> None:
    table = elastic_table(hosts=True)
    filled = start(table, "a", 8_000)
    assert filled.decoder_id == "d1"
    assert table.bind("b", 800, 0.0) == Placement("p1", None)
    assert Turn.last(table, "b").advance(table, 800)
    conversation = table.begin("b", 1.0)
    assert conversation is not None
    assert conversation.home == "p1"
    assert table.prefill_later_turn(conversation) is None


def test_idle_histories_make_room_up_to_what_is_kept_free_for_those_that_decode() -> None:
    table = elastic_table(pausing=Pausing())
    table.engine_says("d1", EngineLoad(decodes=20, step_s=0.02), 0.0)
    for number in range(8):
        idle = start(table, f"idle{number}", 1_000)
        assert idle.advance(table, 990, (str(number).encode() * 16,))
    assert table.decoders["d1"].held_tokens == 8_000
    assert table.bind("next", 1_000, 1_000.0) is not None
    assert table.memory is not None
    assert len(table.memory._paused_on) == 0
    assert table.bind("another", 1_000, 1_000.0) is not None
    assert len(table.memory._paused_on) == 1
    assert table.decoders["d1"].held_tokens == 9_000


def test_a_history_that_is_computed_anew_at_home_counts_as_recomputed() -> None:
    table = elastic_table(pausing=Pausing())
    assert table.memory is not None
    idle = start(table, "a", 4_000)
    assert idle.advance(table, 3_990, (b"1" * 16,))
    table.memory.pause(the(table, "a"), "room")
    table.memory.lost([])
    # Its decoder is taken to have it yet.
    assert table.bind("a", 4_100, 5.0) == Placement("d1", None)
    assert (table.recomputed_tokens, table.memory.restores["kept"]) == (0, 1)
    assert Turn.last(table, "a").advance(table, 4_100, (b"2" * 16,))
    table.memory.pause(the(table, "a"), "room")
    # Others have needed its room since.
    start(table, "b", 9_000).advance(table, 8_990, (b"3" * 16,))
    table.release("b")
    assert table.bind("a", 4_200, 6.0) == Placement("d1", None)
    assert (table.recomputed_tokens, table.memory.restores["again"]) == (4_110, 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("bind", "end", "release", "says", "lose", "return", "leave")),
            st.integers(0, 5),
            st.integers(1, 4_000),
            st.floats(0, 3),
        ),
        max_size=30,
    )
)
def test_whoever_comes_and_goes_nobody_is_sent_to_who_is_not_there(
    steps: Sequence[tuple[str, int, int, float]],
) -> None:
    table = elastic_table(hosts=True)
    now_s, there, leaving = 0.0, {"d1", "p1"}, set[str]()
    engines = ("d1", "p1")
    for what, number, tokens, then_s in steps:
        now_s += then_s
        name, engine_id = f"c{number}", engines[number % 2]
        known = table.get(name)
        if what == "bind" and (known is None or known.home is None):
            placement = table.bind(name, tokens, now_s, opening=Opening(chain(name)))
            if placement is not None:
                used = {placement.decoder_id, placement.prefiller_id or placement.decoder_id}
                assert used <= there - leaving
        elif what == "end" and known is not None and known.running and known.home:
            Turn.last(table, name).advance(table, tokens, (b"1" * 16,), now_s)
        elif what == "release":
            table.release(name)
        elif what == "says":
            table.engine_says(engine_id, EngineLoad(tokens, number, 0.02), now_s)
        elif what == "lose":
            table.remove_engine(engine_id)
            table.remove_engine(engine_id)
            there.discard(engine_id)
            leaving.discard(engine_id)
        elif what == "return":
            table.add_decoder(engine_id, 10_000)
            if engine_id == "p1":
                table.add_prefiller(engine_id)
            there.add(engine_id)
        elif what == "leave" and engine_id in there:
            table.leave(engine_id)
            leaving.add(engine_id)
        for one in engines:
            work = loads_of(table).work(one, now_s)
            assert work.backlog_tokens >= 0
            assert work.backlog_s >= 0


def parking_table() -> ConversationTable:
    """A table with host memory, in which "a" has a history of 2,000 tokens on ``d1``."""
    table = elastic_table(hosts=True, pausing=Pausing())
    assert table.memory is not None
    table.memory.set_host_tokens(100_000)
    first = start(table, "a", 2_000)
    assert the(table, "a").home == "d1"
    assert first.advance(table, 1_990, (b"1" * 16,))
    table.memory.parked(the(table, "a"), 2_000)
    return table


def test_a_turn_whose_home_is_busy_is_bound_where_it_waits_less() -> None:
    table = parking_table()
    table.engine_says("d1", EngineLoad(prefill_tokens=50_000), 1.0)
    assert table.begin("a", 1.0) is None
    assert table.memory is not None
    assert table.memory.pauses["load"] == 1
    placement = table.bind("a", 2_020, 1.0)
    assert placement == Placement("p1", None)
    assert table.memory.restores["reloaded"] == 1


def test_a_turn_whose_home_is_idle_stays_and_what_it_appends_counts_there() -> None:
    table = parking_table()
    conversation = table.begin("a", 1.0, prompt_tokens=5_000)
    assert conversation is not None
    assert conversation.home == "d1"
    assert backlog(table, "d1", 1.0) == 3_000


def test_without_host_memory_a_turn_stays_at_its_home_however_busy_that_is() -> None:
    table = elastic_table(hosts=True, pausing=Pausing())
    assert start(table, "a", 2_000).advance(table, 1_990, (b"1" * 16,))
    table.engine_says("d1", EngineLoad(prefill_tokens=50_000), 1.0)
    assert table.begin("a", 1.0) is not None


def test_where_a_turn_costs_least_idle_histories_give_way() -> None:
    table = parking_table()
    table.engine_says("p1", EngineLoad(prefill_tokens=50_000), 1.0)
    room = table.decoders["d1"].free_tokens
    placement = table.bind("b", room + 500, 1.0)
    assert placement == Placement("d1", None)
    assert the(table, "a").home is None


def test_a_turn_runs_where_there_is_room_if_nobody_gives_way_where_it_costs_least() -> None:
    table = parking_table()
    assert table.begin("a", 1.0) is not None
    table.engine_says("p1", EngineLoad(prefill_tokens=50_000), 1.0)
    placement = table.bind("b", table.decoders["d1"].free_tokens + 500, 1.0)
    assert placement == Placement("p1", None)


def test_a_history_with_a_running_turn_stays_however_busy_its_engine_is() -> None:
    table = parking_table()
    assert table.begin("a", 1.0) is not None
    table.engine_says("d1", EngineLoad(prefill_tokens=50_000), 1.0)
    assert table.begin("a", 1.0) is not None


def test_an_append_moves_a_turn_that_would_stay_without_it() -> None:
    busy = EngineLoad(decodes=2, step_s=0.01)
    short, long = parking_table(), parking_table()
    for table in (short, long):
        table.engine_says("d1", busy, 1.0)
        table.engine_says("p1", EngineLoad(decodes=1, step_s=0.01), 1.0)
    assert short.begin("a", 1.0, prompt_tokens=2_010) is not None
    assert long.begin("a", 1.0, prompt_tokens=9_000) is None


def test_one_engine_without_room_does_not_keep_another_from_being_looked_at() -> None:
    table = parking_table()
    memory = table.memory
    assert memory is not None
    d1, p1 = table.decoders["d1"], table.decoders["p1"]
    need = d1.free_tokens + 500
    nothing = Shared({})
    # No history is idle on p1; that on d1 gives way.
    assert not memory.make_room(p1.free_tokens + 500, [p1], nothing, 1.0)
    assert memory.make_room(need, [d1], nothing, 1.0)
    # What was in vain is forgotten with an engine.
    assert not memory.make_room(p1.free_tokens + 500, [p1], nothing, 1.0)
    memory.decoder_lost("p1")
    assert memory._no_room == {}
