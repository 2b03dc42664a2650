"""Later turns without the table, with messages late, repeated or lost, and processes that die."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conserve.direct import LEASE_S
from tests.unit.conserve.direct.world import (
    Asked,
    Client,
    Decoder,
    Message,
    Planned,
    Reported,
    World,
    digest,
)

WHICH = st.integers(0, 2**16)
OFTEN = st.sampled_from([True, True, True, False])
MISHAPS = ["leaves", "dies", "taken for lost", "table dies"]


class Protocol(RuleBasedStateMachine):
    """`World.check` holds after every step, and all agree once everything has come."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world = World()
        self.patch.setattr("conserve.holdings.unix_s", lambda: self.world.now_s)

    @initialize()
    def two_decoders(self) -> None:
        for _ in range(2):
            self.decoder_starts()

    def one_of(self, which: int) -> Decoder:
        return list(self.world.decoders.values())[which % len(self.world.decoders)]

    def then(self, promptly: bool) -> None:
        if promptly:
            self.world.settle()

    # --- clients -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.clients) < 5)
    @rule(named=OFTEN, chats=OFTEN, which=WHICH, promptly=OFTEN)
    def client_comes(self, named: bool, chats: bool, which: int, promptly: bool) -> None:
        name = f"c{which % 3}" if named else None
        client = Client(name, digest(name, which % 2), chats=chats or not named)
        self.world.clients.append(client)
        self.world.turn(client, 0)
        self.then(promptly)

    @precondition(lambda self: self.world.clients)
    @rule(which=WHICH, promptly=OFTEN)
    def goes_on(self, which: int, promptly: bool) -> None:
        client = self.world.clients[which % len(self.world.clients)]
        self.world.turn(client, len(client.answers))
        self.then(promptly)

    @precondition(lambda self: self.world.clients)
    @rule(which=WHICH, turns=st.integers(1, 3))
    def has_whole_turns(self, which: int, turns: int) -> None:
        """Turns one after the other, with nothing late."""
        client = self.world.clients[which % len(self.world.clients)]
        for _ in range(turns):
            self.world.settle()
            self.world.turn(client, len(client.answers))
            self.world.settle()
            for decoder in self.world.decoders.values():
                for turn, (whose, _) in list(decoder.running.items()):
                    if whose is client:
                        self.world.end(decoder, turn, completed=True)

    @precondition(lambda self: self.world.clients)
    @rule(which=WHICH, back=st.integers(1, 2))
    def goes_back(self, which: int, back: int) -> None:
        """A retry, an edit or a branch."""
        client = self.world.clients[which % len(self.world.clients)]
        self.world.turn(client, max(0, len(client.answers) - back))

    @precondition(lambda self: self.world.clients)
    @rule(which=WHICH)
    def ends_its_conversation(self, which: int) -> None:
        self.world.release(self.world.clients[which % len(self.world.clients)])

    # --- turns -------------------------------------------------------------------------------

    @precondition(lambda self: any(one.running for one in self.world.decoders.values()))
    @rule(which=WHICH, completed=OFTEN, promptly=OFTEN)
    def turn_ends(self, which: int, completed: bool, promptly: bool) -> None:
        running = [
            (decoder, turn) for decoder in self.world.decoders.values() for turn in decoder.running
        ]
        self.world.end(*running[which % len(running)], completed=completed)
        self.then(promptly)

    # --- messages ----------------------------------------------------------------------------

    @precondition(lambda self: self.world.mail)
    @rule(which=WHICH, twice=st.booleans())
    def message_comes(self, which: int, twice: bool) -> None:
        mail = self.world.mail
        message = mail.pop(which % len(mail))
        self.world.deliver(message)
        if twice and not _is_turn(message):
            mail.append(message)

    @precondition(lambda self: self.world.mail)
    @rule(which=WHICH)
    def message_is_lost(self, which: int) -> None:
        mail = self.world.mail
        message = mail.pop(which % len(mail))
        if isinstance(message, Planned):
            self.world.give_up(message)

    @precondition(lambda self: self.world.decoders)
    @rule(which=WHICH)
    def decoder_reports(self, which: int) -> None:
        self.world.reports(self.one_of(which))

    @precondition(lambda self: self.world.decoders)
    @rule(which=WHICH)
    def decoder_asks(self, which: int) -> None:
        self.world.asks(self.one_of(which))

    @precondition(lambda self: self.world.decoders)
    @rule(which=WHICH, heard=OFTEN)
    def decoder_beats(self, which: int, heard: bool) -> None:
        self.world.beats(self.one_of(which), heard=heard)

    # --- the table's decisions ---------------------------------------------------------------

    @rule(where=st.integers(0, 5))
    def next_place(self, where: int) -> None:
        self.world.policy.draw = where

    @rule(which=WHICH)
    def history_is_paused(self, which: int) -> None:
        table = self.world.table
        idle = [one for one in table.live() if one.decoder_id is not None and not one.running]
        if idle:
            assert table.memory is not None
            table.memory.pause(idle[which % len(idle)], "room")

    # --- mishaps -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.decoders) < 4)
    @rule()
    def decoder_starts(self) -> None:
        decoder = Decoder(f"d{self.world.unique()}")
        self.world.decoders[decoder.id] = decoder
        self.world.register(decoder)

    @precondition(lambda self: len(self.world.decoders) > 1)
    @rule(which=WHICH, what=st.sampled_from(MISHAPS))
    def mishap(self, which: int, what: str) -> None:
        world, decoder = self.world, self.one_of(which)
        if what == "leaves":
            decoder.leaving = True
            decoder.desk.close()
            world.table.leave(decoder.id)
            world.table.evict(decoder.id)
        elif what == "dies":
            del world.decoders[decoder.id]
            world.table.remove_decoder(decoder.id)
        elif what == "taken for lost":
            world.doubt(decoder)
        else:
            world.restart_table()

    @rule(seconds=st.sampled_from([0.5, 0.5, LEASE_S, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def no_turn_is_where_it_may_not_be(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self._all_comes_to_its_end()
        finally:
            self.patch.undo()

    def _all_comes_to_its_end(self) -> None:
        """If nothing is lost any more, the table knows all histories."""
        world = self.world
        for _ in range(4):
            for decoder in world.decoders.values():
                for turn in list(decoder.running):
                    world.end(decoder, turn, completed=True)
            world.settle()
        table = world.table
        assert [one.id for one in table.live() if one.running] == []
        for one in table.live():
            if one.decoder_id is None or (one.id, one.incarnation) in world.doubtful:
                continue
            holds = world.decoders[one.decoder_id].holdings.all()
            (held,) = [held for held in holds if held.id == one.id]
            assert (held.incarnation, held.tails) == (one.incarnation, one.tails)
            assert held.finished <= one.finished
        for decoder in table.decoders.values():
            mine = [one for one in table.live() if one.decoder_id == decoder.id]
            assert decoder.conversations == len(mine)


@pytest.mark.parametrize("chats", [True, False])
def test_what_was_taken_back_is_asked_for(chats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random plays seldom have a pause of which the decoder has heard."""
    world = World()
    monkeypatch.setattr("conserve.holdings.unix_s", lambda: world.now_s)
    decoder = world.decoders["d"] = Decoder("d")
    world.register(decoder)
    client = Client("c", digest("c"), chats=chats)

    def has_a_turn() -> int:
        """Return how many turns have gone straight by then."""
        world.settle()
        world.turn(client, len(client.answers))
        world.settle()
        for turn in list(decoder.running):
            world.end(decoder, turn, completed=True)
        world.settle()
        return world.straight_turns

    assert [has_a_turn(), has_a_turn()] == [0, 1]
    (history,) = world.table.live()
    assert world.table.memory is not None
    world.table.memory.pause(history, "room")
    assert [has_a_turn(), has_a_turn()] == [1, 2]


def _is_turn(message: Message) -> bool:
    """Turns are not repeated by a router that had no answer."""
    return not isinstance(message, Reported | Asked)


Protocol.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, print_blob=True
)
TestProtocol = Protocol.TestCase


@pytest.mark.long
class TestLongProtocol(Protocol.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=4000, stateful_step_count=120, deadline=None)
