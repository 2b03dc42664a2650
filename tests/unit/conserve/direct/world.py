"""Clients, routers, decoders and a table, with all that is between them on its way.

What decides is real: `ConversationTable`, `Holdings`, `Desk`, `Notices`, `Outbox`, `Homes`. What
carries it is a list of messages, which come late, twice, or never.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from conserve import identity
from conserve.conversations import ConversationTable
from conserve.direct import Began, Continued, Desk, Ended, Home, Homes, Notice, Report, is_direct
from conserve.histories.kinship import Opening
from conserve.histories.points import mark
from conserve.history import TurnKey, TurnStats
from conserve.holdings import Holdings
from conserve.pausing import Pausing
from conserve.placement import Placement, PlacementPolicy
from conserve.recognition import Chain, Digest

IDLE_S, TURN_S = 600.0, 60.0
RECOVERY_S = 8.0


def digest(*parts: object) -> Digest:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


class Drawn(PlacementPolicy):
    """A placement policy that places where it is told to."""

    def __init__(self) -> None:
        self.draw = 0

    def place(
        self,
        prompt_tokens: int,
        decoders: Iterable[Any],
        prefillers: object,
        shared: object = None,
        now_s: float = 0.0,
    ) -> Placement | None:
        ids = sorted(one.id for one in decoders)
        return Placement(ids[self.draw % len(ids)], None) if ids else None


@dataclass
class Client:
    """A client with a first prompt and some answers, or with completions."""

    name: str | None
    root: Digest
    answers: list[Digest] = field(default_factory=list)
    chats: bool = True

    def chain(self, answers: int) -> Chain | None:
        """The chain of a turn that follows this many answers; None for a completion."""
        if not self.chats:
            return None
        ends = tuple(reversed(self.answers[:answers]))
        return Chain(self.root, None, ends, ends_with_root=not ends)


@dataclass
class Decoder:
    """A live decoder.

    Attributes:
        registered: whether it believes that the table knows it.
        running: its turns under way, and their clients.
    """

    id: str
    holdings: Holdings = field(default_factory=Holdings)
    registered: bool = False
    leaving: bool = False
    running: dict[TurnKey, tuple[Client, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.desk = Desk(self.holdings, IDLE_S)


@dataclass
class Planned:
    """A turn on its way from a router to the decoder that the table has named."""

    turn: TurnKey
    decoder_id: str
    later: bool
    points: bytes
    client: Client
    answers: int


@dataclass
class Straight:
    """A turn on its way to the decoder that a router remembers."""

    decoder_id: str
    client: Client
    answers: int


@dataclass
class Reported:
    """A report on its way to the table."""

    decoder_id: str
    registration: int
    report: Report


@dataclass
class Answered:
    """The answer to a report, on its way back."""

    decoder_id: str
    registration: int
    number: int


@dataclass
class Asked:
    """A decoder asks for notices."""

    decoder_id: str
    registration: int
    heard: int
    at_s: float


@dataclass
class Told:
    """The answer to `Asked`; None if the decoder has to register."""

    decoder_id: str
    registration: int
    notice: Notice | None
    at_s: float


Message = Planned | Straight | Reported | Answered | Asked | Told


class World:
    """All processes, and the invariants that hold after each step."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.policy = Drawn()
        self.homes = Homes()
        self.decoders: dict[str, Decoder] = {}
        self.mail: list[Message] = []
        self.clients: list[Client] = []
        self.keys: set[TurnKey] = set()
        # Histories on a decoder that was taken for lost and lives, or with a turn on its way that a
        # lost table has planned: of their next turns nothing is promised, as ever.
        self.doubtful: set[tuple[str, int]] = set()
        # The newest answer of each history, by its id and incarnation.
        self.newest: dict[tuple[str, int], Digest] = {}
        # Those of which a client was told that they have ended, and those that are about to be.
        self.ended: set[tuple[str, int]] = set()
        self.ending: list[tuple[set[tuple[str, int]], dict[str, int]]] = []
        self.straight_turns = 0
        self._number = 0
        self._new_table()

    def _new_table(self) -> None:
        first_id = max((key.turn_id for key in self.keys), default=0) + 1
        self.table = ConversationTable(self.policy, IDLE_S, TURN_S, first_id, pausing=Pausing())
        self.table_began_s = self.now_s

    def unique(self) -> int:
        self._number += 1
        return self._number

    # --- what happens at routers and the table -----------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether the table binds: it knows all decoders, or has waited long enough."""
        known = all(one.id in self.table.decoders for one in self.decoders.values())
        return known or self.now_s - self.table_began_s >= RECOVERY_S

    def turn(self, client: Client, answers: int) -> None:
        """A client sends a turn."""
        home = self.homes.find(client.name, client.chain(answers), None)
        if home is not None and home.decoder_id in self.decoders:
            self.mail.append(Straight(home.decoder_id, client, answers))
        else:
            self.ask(client, answers)

    def ask(self, client: Client, answers: int) -> None:
        """Like `TableService.begin` and `place`, except that turns which would wait are dropped."""
        if not self.ready:
            return
        chain, table = client.chain(answers), self.table
        history_id = table.recognise(chain, client.name) if chain else None
        if history_id is None and client.name is None:
            history_id = f"conv-{self.unique():024x}"
        elif history_id is None and not client.chats:
            assert client.name is not None
            first, beside = table.get(client.name), identity.further(client.name, 0)
            chats = first is not None and first.root is not None
            history_id = beside if chats or beside in table else client.name
        elif history_id is None:
            assert client.name is not None
            taken = client.name in table
            history_id = identity.further(client.name, self.unique()) if taken else client.name
        later = table.begin(history_id, self.now_s) is not None
        if not later:
            if table.notices.unconfirmed(history_id):
                return
            if table.bind(history_id, 10, self.now_s, opening=Opening(chain)) is None:
                return
        history = table.get(history_id)
        assert history is not None
        assert history.decoder_id is not None
        turn = history.newest_turn
        assert turn not in self.keys, "two turns have one key"
        self.keys.add(turn)
        where = history.decoder_id
        self.homes.remember(client.name, chain, Home(where, ""))
        if where in self.decoders:
            self.mail.append(
                Planned(turn, where, later, b"" if later else history.points, client, answers)
            )
        else:
            # Its router finds that out, and tells.
            self.table.abandon(turn, None, None, self.now_s)

    def give_up(self, planned: Planned) -> None:
        """A client leaves before its turn has reached the decoder."""
        self.table.abandon(planned.turn, None, None, self.now_s)

    def release(self, client: Client) -> None:
        """A client ends its conversation, and gets an answer when decoders have heard of it."""
        if client.name is None or not self.ready:
            return
        table = self.table
        found = table.histories(client.name)
        told: set[str] = set()
        for history in found:
            table.release(history.id)
        assert table.memory is not None
        for one in table.memory.take_forgotten():
            where = (one.decoder_id, one.history_id, one.incarnation)
            table.notices.give_up(*where, ended=True)
        for history in found:
            told.update(table.notices.unconfirmed(history.id))
        numbers = {decoder_id: table.notices.probe(decoder_id) for decoder_id in told}
        self.ending.append(({(one.id, one.incarnation) for one in found}, numbers))

    def restart_table(self) -> None:
        """The table dies, and its successor knows nothing. Open requests get no answer."""
        self._new_table()
        self.mail = [one for one in self.mail if isinstance(one, Planned | Straight)]
        self.doubtful |= {one.turn[:2] for one in self.mail if isinstance(one, Planned)}
        # Who was told nothing yet is told an error.
        self.ending.clear()

    def doubt(self, decoder: Decoder) -> None:
        """A router, or silence, makes the table count a live decoder as lost."""
        self.table.remove_decoder(decoder.id)
        self.doubtful |= {(one.id, one.incarnation) for one in decoder.holdings.all()}
        self.doubtful |= {
            one.turn[:2]
            for one in self.mail
            if isinstance(one, Planned) and one.decoder_id == decoder.id
        }

    # --- what happens at decoders ------------------------------------------------------------

    def register(self, decoder: Decoder, *, heard: bool = True) -> None:
        """A decoder reports all that it holds.

        Args:
            heard: whether the answer arrives.
        """
        decoder.registered = False
        decoder.desk.stop()
        registration = decoder.desk.outbox.register()
        if decoder.id in self.table.decoders:
            self.table.remove_decoder(decoder.id)
        holds = decoder.holdings.all()
        incarnations = {one.id: one.incarnation for one in holds}
        foreign = self.table.add_decoder(decoder.id, 10**9, holds)
        self.table.notices.add(decoder.id, registration)
        if decoder.leaving:
            self.table.leave(decoder.id)
        if heard:
            for history_id in foreign:
                decoder.holdings.drop(history_id, incarnations[history_id])
            decoder.registered = True

    def end(self, decoder: Decoder, turn: TurnKey, *, completed: bool) -> None:
        """A turn ends at its decoder, and its client gets an answer."""
        client, answers = decoder.running.pop(turn)
        answer = digest(self.unique())
        tails = (answer,) if completed and client.chats else ()
        # All of the prompt was there, so no history counts as evicted.
        stats = TurnStats(10 + answers, 1, 10 + answers, 0)
        decoder.holdings.finish(turn, stats, tails, completed)
        decoder.desk.outbox.add(Ended(turn, stats, tails, completed))
        if completed:
            client.answers = [*client.answers[:answers], answer]
            self.newest[turn[:2]] = answer

    # --- messages ----------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Deliver a message, if its receiver lives."""
        decoder = self.decoders.get(message.decoder_id)
        if isinstance(message, Reported):
            self._report(message)
        elif isinstance(message, Asked):
            self._ask_for_notices(message)
        elif decoder is None:
            if isinstance(message, Planned):
                self.table.abandon(message.turn, None, None, self.now_s)
        elif isinstance(message, Planned):
            chats = message.client.chats and not message.later
            root = message.client.root if chats else None
            decoder.holdings.begin(message.turn, root, message.points, not message.later)
            decoder.running[message.turn] = (message.client, message.answers)
        elif isinstance(message, Straight):
            self._begin_straight(decoder, message)
        elif isinstance(message, Answered):
            if message.registration == decoder.desk.outbox.registration:
                decoder.desk.outbox.answered(message.number)
        elif message.registration == decoder.desk.outbox.registration:
            if message.notice is None:
                decoder.registered = False
                decoder.desk.stop()
            else:
                decoder.desk.hear(message.notice, message.at_s)

    def _begin_straight(self, decoder: Decoder, message: Straight) -> None:
        client, answers = message.client, message.answers
        chain = client.chain(answers)
        asked = Continued(b"", b"", client.name)
        if chain is not None:
            asked = Continued(chain.root, chain.ends[0], client.name)
        turn = decoder.desk.begin(asked, "router", self.now_s)
        if turn is None:
            self.homes.forget(client.name, chain)
            self.ask(client, answers)
            return
        self.straight_turns += 1
        assert turn not in self.keys, "two turns have one key"
        assert is_direct(turn.turn_id)
        self.keys.add(turn)
        decoder.running[turn] = (client, answers)
        history = turn[:2]
        if history in self.doubtful:
            return
        assert history not in self.ended, "a turn goes on with what has ended"
        if client.chats:
            assert mark(self.newest[history]) == mark(asked.end), "it goes on with an old answer"
        known = self.table.get(turn.history_id)
        if known is not None and known.incarnation == turn.incarnation:
            assert known.decoder_id in (decoder.id, None), "it has moved"
            if known.decoder_id is None:
                assert self.table.notices.may_run(decoder.id, *history), "it was taken back"

    def _report(self, message: Reported) -> None:
        notices, decoder_id = self.table.notices, message.decoder_id
        if not notices.is_current(decoder_id, message.registration):
            self.mail.append(Told(decoder_id, message.registration, None, self.now_s))
            return
        new = notices.is_new(decoder_id, message.report.number)
        for event in message.report.events if new else ():
            if isinstance(event, Began):
                self.table.began(event.turn, decoder_id, self.now_s, event.parks)
            elif event.completed:
                assert event.stats is not None
                self.table.advance(event.turn, decoder_id, event.stats, event.tails, self.now_s)
            else:
                self.table.abandon(event.turn, decoder_id, event.stats, self.now_s)
        notices.confirm(decoder_id, message.report.heard)
        number = message.report.number
        self.mail.append(Answered(decoder_id, message.registration, number))

    def _ask_for_notices(self, message: Asked) -> None:
        notices, decoder_id = self.table.notices, message.decoder_id
        notice = None
        if notices.is_current(decoder_id, message.registration):
            notice = notices.due(decoder_id, message.heard)
        self.mail.append(Told(decoder_id, message.registration, notice, message.at_s))

    # --- all at once -------------------------------------------------------------------------

    def reports(self, decoder: Decoder) -> None:
        """A decoder sends its report, or repeats it."""
        outbox = decoder.desk.outbox
        report = outbox.next() if decoder.registered else None
        if report is not None:
            self.mail.append(Reported(decoder.id, outbox.registration, report))

    def asks(self, decoder: Decoder) -> None:
        """A decoder asks for notices."""
        outbox = decoder.desk.outbox
        if decoder.registered:
            asked = Asked(decoder.id, outbox.registration, outbox.heard, self.now_s)
            self.mail.append(asked)

    def beats(self, decoder: Decoder, *, heard: bool = True) -> None:
        """A decoder's beat finds that the table does not know it, or that one does not know
        that.
        """
        if not decoder.registered or decoder.id not in self.table.decoders:
            self.register(decoder, heard=heard)

    def settle(self) -> None:
        """Deliver all messages in order, and those that they cause."""
        for _ in range(3):
            for decoder in list(self.decoders.values()):
                self.beats(decoder)
                self.reports(decoder)
                self.asks(decoder)
            while self.mail:
                self.deliver(self.mail.pop(0))
            self.check()

    # --- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """No history has turns at two decoders, and clients that were told of an end were told the
        truth.
        """
        where: dict[tuple[str, int], str] = {}
        for decoder in self.decoders.values():
            for turn in decoder.running:
                if turn[:2] not in self.doubtful:
                    assert where.setdefault(turn[:2], decoder.id) == decoder.id, "it runs at two"
        for found, numbers in list(self.ending):
            if all(self.table.notices.has_heard(*one) for one in numbers.items()):
                self.ended |= found
                self.ending.remove((found, numbers))
