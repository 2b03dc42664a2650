"""A beginning that prompts share is computed once, and taken from host memory elsewhere."""

from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.pausing import Pausing
from conserve.placement import Coming, ElasticPlacement, EngineCosts, EngineLoad, Loads, Placement
from conserve.recognition import Chain
from tests.unit.conserve.conversations.scene import Turn, a_table, stats, the

SYSTEM_TOKENS = 2_000
# A token takes a millisecond; one more answer beside another holds both up for long.
COSTS = EngineCosts(
    per_token_s=1e-3, handoff_constant_s=0.02, handoff_per_token_s=1e-5, step_s=0.01,
    per_sequence_s=0.1,
)  # fmt: skip


def lending_table(decoders: int = 2, host_tokens: int = 100_000) -> ConversationTable:
    policy = ElasticPlacement(Loads(COSTS))
    table = a_table(decoders, 0, capacity_tokens=20_000, policy=policy, pausing=Pausing())
    assert table.memory is not None
    table.memory.set_host_tokens(host_tokens)
    return table


def opening(name: str, system: str = "tools", tokens: int = SYSTEM_TOKENS) -> Opening:
    return Opening(Chain(name.encode().ljust(16), system.encode().ljust(16), (), True), tokens)


def begin(table: ConversationTable, name: str, now_s: float = 0.0, **more: str) -> Placement:
    placement = table.bind(name, SYSTEM_TOKENS + 100, now_s, opening=opening(name, **more))
    assert placement is not None
    return placement


def stored(table: ConversationTable, name: str) -> None:
    table.prefilled(Turn.last(table, name).key, SYSTEM_TOKENS + 100)


def coming(name: str, engine_id: str, done_in_s: float) -> Coming:
    return Coming(name, engine_id, SYSTEM_TOKENS, done_in_s)


def test_those_that_come_while_it_is_computed_wait_for_it_elsewhere() -> None:
    table = lending_table()
    assert begin(table, "first") == Placement("d1", None)
    assert table.park(the(table, "first"))
    second = begin(table, "second")
    assert second == Placement("d2", None, coming("first", "d1", 2.1))
    # Nothing of it is there yet, though it is promised: a third one there waits as well.
    third = begin(table, "third", 0.5)
    assert third.after is None or third.decoder_id == "d2"
    fourth = begin(table, "fourth", 0.5)
    assert {third.decoder_id, fourth.decoder_id} == {"d1", "d2"}
    (there,) = (one for one in (third, fourth) if one.decoder_id == "d2")
    assert there.after is not None
    assert there.after.history_id == "first"
    # The others' prompts bring nothing new.
    assert not any(table.park(the(table, name)) for name in ("second", "third", "fourth"))


def test_once_it_is_stored_nothing_waits() -> None:
    table = lending_table()
    begin(table, "first")
    assert begin(table, "second").after is not None
    stored(table, "first")
    assert begin(table, "third", 0.1).after is None
    assert table.loads is not None
    # The second one's work is what it does not load.
    assert table.loads.work("d2", 0.1).backlog_tokens <= 200


def test_what_was_waited_for_and_failed_is_not_coming_any_more() -> None:
    table = lending_table()
    begin(table, "first")
    waits = begin(table, "second")
    assert waits.after is not None
    memory = table.memory
    assert memory is not None
    assert memory.is_coming(waits.after)
    Turn.last(table, "first").abandon(table)
    assert not memory.is_coming(waits.after)
    table.has_waited(Turn.last(table, "second").key)
    # It computes it itself now, where the next one finds it.
    after = begin(table, "third", 0.1)
    assert (after.decoder_id, after.after) == ("d2", None)


def test_an_engine_that_is_lost_brings_nothing() -> None:
    table = lending_table(decoders=3)
    begin(table, "first")
    waits = begin(table, "second")
    assert waits.after is not None
    table.remove_engine("d1")
    assert table.memory is not None
    assert not table.memory.is_coming(waits.after)


def test_siblings_spread_once_memory_has_their_beginning() -> None:
    table = lending_table()
    homes = []
    for number in range(4):
        name = f"child{number}"
        homes.append(begin(table, name, 10.0 * number).decoder_id)
        stored(table, name)
        for engine_id in ("d1", "d2"):
            decodes = homes.count(engine_id)
            table.engine_says(engine_id, EngineLoad(0, decodes, 0.01), 10.0 * number + 1)
    assert sorted(homes) == ["d1", "d1", "d2", "d2"]


def test_it_is_left_there_only_where_another_engine_could_take_it() -> None:
    alone = lending_table(decoders=1)
    begin(alone, "first")
    assert not alone.park(the(alone, "first"))
    without = lending_table(host_tokens=0)
    begin(without, "first")
    assert not without.park(the(without, "first"))
    short = lending_table()
    assert short.bind("a", 600, 0.0, opening=opening("a", tokens=500)) is not None
    assert not short.park(the(short, "a"))


def test_a_beginning_of_its_own_takes_no_room_from_others_in_memory() -> None:
    table = lending_table(host_tokens=2_000)
    assert table.bind("full", 2_100, 0.0, opening=opening("full", tokens=0)) is not None
    stored(table, "full")
    begin(table, "other", 1.0, system="others")
    assert not table.park(the(table, "other"))
    # Another one with that beginning shows that it is shared.
    begin(table, "another", 2.0, system="others")
    assert table.park(the(table, "another"))


def test_a_lender_that_ends_is_followed_by_the_next() -> None:
    table = lending_table()
    begin(table, "first")
    stored(table, "first")
    turn = Turn.last(table, "first")
    assert table.advance(turn.key, turn.decoder_id, stats(2_100), (), 1.0)
    begin(table, "second", 2.0)
    assert not table.park(the(table, "second"))
    table.release("first")
    begin(table, "third", 3.0)
    assert table.park(the(table, "third"))
