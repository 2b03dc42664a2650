"""Later turns that do not ask the table: what routers, decoders and the table keep for them.

docs/how/later-turns.md has the protocol.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from conserve.hints import Hints
from conserve.holdings import Holdings
from conserve.recognition import Chain, Digest
from conserve.turn import TurnKey, TurnStats


class Notice(NamedTuple):
    """Orders for a decoder: histories to give up or to load, and a recorder's salt, if any."""

    number: int
    given_up: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    parks: bool = False
    prefetch: tuple[str, ...] = ()
    salt: bytes = b""


@dataclass(slots=True)
class _Decoder:
    registration: int
    number: int = 0
    heard: int = 0
    reported: int = 0
    # By history: its incarnation, the notice's number, and whether it has ended.
    given_up: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    # By history that is brought back: the notice's number.
    prefetch: dict[str, int] = field(default_factory=dict)


class Notices:
    """Keeps which histories each decoder was told to give up, and whether it has confirmed that.

    Reports come in order, so once a notice is confirmed, no turn of such a history runs there
    unknown to the table. Until then the history is bound nowhere else. ``tell`` is called with a
    decoder's id when there is something new for it, or it is gone.
    """

    def __init__(self) -> None:
        self._decoders: dict[str, _Decoder] = {}
        self.tell: Callable[[str], None] = lambda _: None

    def add(self, decoder_id: str, registration: int) -> None:
        known = self._decoders.get(decoder_id)
        if known is None or known.registration != registration:
            self._decoders[decoder_id] = _Decoder(registration)
            self.tell(decoder_id)

    def remove(self, decoder_id: str) -> None:
        if self._decoders.pop(decoder_id, None) is not None:
            self.tell(decoder_id)

    def is_current(self, decoder_id: str, registration: int) -> bool:
        known = self._decoders.get(decoder_id)
        return known is not None and known.registration == registration

    @property
    def decoders(self) -> list[str]:
        return list(self._decoders)

    def give_up(
        self, decoder_id: str, history_id: str, incarnation: int, *, ended: bool = False
    ) -> None:
        decoder = self._decoders.get(decoder_id)
        if decoder is not None:
            decoder.number += 1
            decoder.given_up[history_id] = (incarnation, decoder.number, ended)
            decoder.prefetch.pop(history_id, None)
            self.tell(decoder_id)

    def prefetch(self, decoder_id: str, history_id: str) -> None:
        """Tell a decoder to load what host memory has of a history."""
        decoder = self._decoders.get(decoder_id)
        if decoder is not None:
            decoder.number += 1
            decoder.prefetch[history_id] = decoder.number
            self.tell(decoder_id)

    def probe(self, decoder_id: str) -> int:
        """Add an empty notice and return its number; once confirmed, all before is known."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None:
            return 0
        decoder.number += 1
        self.tell(decoder_id)
        return decoder.number

    def due(self, decoder_id: str, heard: int) -> Notice | None:
        """Return the notice for a decoder, of what it has not heard; None if it is not known."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None:
            return None
        new: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        for history_id, (incarnation, number, ended) in decoder.given_up.items():
            if number > heard:
                new[ended].append((history_id, incarnation))
        prefetch = tuple(one for one, number in decoder.prefetch.items() if number > heard)
        return Notice(decoder.number, tuple(new[False]), tuple(new[True]), prefetch=prefetch)

    def confirm(self, decoder_id: str, heard: int) -> None:
        """Note that a decoder has obeyed notices up to ``heard``."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None or heard <= decoder.heard:
            return
        decoder.heard = heard
        decoder.prefetch = {
            one: number for one, number in decoder.prefetch.items() if number > heard
        }
        decoder.given_up = {one: told for one, told in decoder.given_up.items() if told[1] > heard}

    def has_heard(self, decoder_id: str, number: int) -> bool:
        """Return whether a notice was confirmed, or its decoder is gone."""
        decoder = self._decoders.get(decoder_id)
        return decoder is None or decoder.heard >= number

    def unconfirmed(self, history_id: str) -> list[str]:
        return [id for id, one in self._decoders.items() if history_id in one.given_up]

    def may_run(self, decoder_id: str, history_id: str, incarnation: int) -> bool:
        """Return whether a turn may have begun before its decoder heard to give its history up."""
        decoder = self._decoders.get(decoder_id)
        told = None if decoder is None else decoder.given_up.get(history_id)
        return told is not None and told[0] == incarnation

    def is_new(self, decoder_id: str, report: int) -> bool:
        """Accept a report if it is the next one, and return whether it is."""
        decoder = self._decoders.get(decoder_id)
        if decoder is None or report != decoder.reported + 1:
            return False
        decoder.reported = report
        return True


_MOST_HOMES = 65_536
# A prompt that grows by less is not worth counting its tokens and asking where to compute them. A
# request grows by at least a byte for each token, and mostly by four. Images are not counted in its
# bytes: one may be thousands of tokens, and has to be encoded.
LARGE_TOKENS = 1_000
_BYTES_PER_TOKEN = 4


class Home(NamedTuple):
    """The decoder that had a history's last turn, as far as a router knows.

    Attributes:
        hints: as the table was last told them.
        request_bytes: length of its last turn's body, without images; 0 if not known.
        media: how many images, or other parts with media, that body had.
    """

    decoder_id: str
    url: str
    hints: Hints | None = None
    request_bytes: int = 0
    media: int = 0

    def appends_much(self, request_bytes: int, media: int) -> bool:
        if not self.request_bytes:
            return False
        more_bytes = request_bytes - self.request_bytes
        return more_bytes >= _BYTES_PER_TOKEN * LARGE_TOKENS or media > self.media


class Homes:
    """Remembers, for each first prompt in a conversation, the decoder of its newest history.

    A conversation's completions are one history without messages, found by its id. An entry is a
    guess: the decoder checks it (`Desk`), so a wrong one costs one call.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[str, bytes], Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def remember(self, conversation_id: str | None, chain: Chain | None, home: Home) -> None:
        """Remember where a turn is served; ``chain`` is None for a completion."""
        key = _key(conversation_id, chain)
        if key is None:
            return
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)

    def find(
        self, conversation_id: str | None, chain: Chain | None, hints: Hints | None
    ) -> Home | None:
        """Return where to try a turn; None means to ask the table, as for new hints."""
        key = _key(conversation_id, chain)
        if key is None or key not in self._homes or (chain is not None and not chain.ends):
            return None
        home = self._homes[key]
        if hints is not None and hints != home.hints:
            return None
        self._homes.move_to_end(key)
        return home

    def forget(self, conversation_id: str | None, chain: Chain | None) -> None:
        key = _key(conversation_id, chain)
        if key is not None:
            self._homes.pop(key, None)


def _key(conversation_id: str | None, chain: Chain | None) -> tuple[str, bytes] | None:
    if chain is not None:
        return conversation_id or "", chain.root
    return None if conversation_id is None else (conversation_id, b"")


STRIDE = 256
"""The table numbers turns by multiples of this; numbers between them are the decoder's."""


def first_asked(above: int) -> int:
    return -(-above // STRIDE) * STRIDE


def is_direct(turn_id: int) -> bool:
    return turn_id % STRIDE != 0


# With this many unreported events no turn begins without the table. While the table does not know
# the decoder, this many ends are kept for it.
_MOST_EVENTS = 4096


class Began(NamedTuple):
    """A turn has begun without the table; ``parks``: it leaves its prompt's KV in host memory."""

    turn: TurnKey
    router_id: str
    parks: bool = False


class Alone(NamedTuple):
    """The router of a turn is lost, and its answer goes on; ``digest`` is its request's."""

    turn: TurnKey
    digest: bytes


class Rejoined(NamedTuple):
    """A client has rejoined its answer, by this router."""

    turn: TurnKey
    router_id: str


class Stored(NamedTuple):
    """The prompt of a history's first turn is in host memory; its answer may go on for long."""

    turn: TurnKey
    tokens: int


class Digested(NamedTuple):
    """The digests of a prompt's blocks, for a recorder."""

    turn: TurnKey
    blocks: bytes


class Ended(NamedTuple):
    """A turn has ended; ``stats`` is None if the engine has done nothing."""

    turn: TurnKey
    stats: TurnStats | None
    tails: tuple[Digest, ...]
    completed: bool
    digest: bytes = b""


Happened = Began | Alone | Rejoined | Stored | Digested | Ended


class Report(NamedTuple):
    """Events since the report before, and the number of the last `Notice` obeyed (``heard``)."""

    number: int
    events: tuple[Happened, ...]
    heard: int


class Outbox:
    """A decoder's reports: in order, one at a time, repeated until answered.

    A registration tells all that a decoder holds. Ends are reported after it all the same: the
    table may have planned those turns. A report that comes twice changes nothing.
    """

    def __init__(self) -> None:
        self.registration = 0
        self.heard = 0
        self._is_open = False
        self._number = 0
        self._told = 0
        self._events: list[Happened] = []
        self._under_way: Report | None = None

    @property
    def is_full(self) -> bool:
        return len(self._events) >= _MOST_EVENTS

    def register(self) -> int:
        """Begin a registration, which tells all that the decoder holds, and return its number."""
        self.close()
        self.registration += 1
        self.heard = self._told = self._number = 0
        self._is_open = True
        return self.registration

    def close(self) -> None:
        """Stop reporting to a table that does not know this decoder; keep the ends."""
        unanswered = () if self._under_way is None else self._under_way.events
        events = (*unanswered, *self._events)
        ends: list[Happened] = [one for one in events if isinstance(one, Ended)]
        self._events = ends[-_MOST_EVENTS:]
        self._under_way = None
        self._is_open = False

    def add(self, event: Happened) -> None:
        if self._is_open or (isinstance(event, Ended) and not self.is_full):
            self._events.append(event)

    def obeyed(self, number: int) -> None:
        self.heard = max(self.heard, number)

    def next(self) -> Report | None:
        """Return the unanswered report, else a new one; None if there is nothing to report."""
        if self._under_way is not None or not self._is_open:
            return self._under_way
        if self._events or self.heard > self._told:
            self._number += 1
            self._under_way = Report(self._number, tuple(self._events), self.heard)
            self._events = []
        return self._under_way

    def answered(self, number: int) -> None:
        report = self._under_way
        if report is not None and report.number == number:
            self._told = report.heard
            self._under_way = None


LEASE_S = 5.0
"""How long after it asked for notices a decoder may begin turns by itself.

Shorter than the silence after which it counts as lost (15 s), and than a new table's wait for
decoders to register (8 s): a decoder that the table does not know begins nothing.
"""


class Continued(NamedTuple):
    """The history that a turn continues: by its messages, or a completion by its conversation's id.

    ``root`` and ``end`` digest the first prompt, and all up to the newest answer; empty of
    completions.
    """

    root: Digest
    end: Digest
    conversation_id: str | None


class Desk:
    """Accepts turns that come straight to a decoder, if each is plainly the next of its history.

    It continues the newest answer of a history that this decoder holds, no turn of which runs, and
    which the table has not taken back. Histories idle for half of ``idle_timeout_s`` are the
    table's, which may be about to end them.
    """

    def __init__(self, holdings: Holdings, idle_timeout_s: float) -> None:
        self._holdings = holdings
        self._longest_idle_s = idle_timeout_s / 2
        self._until_s = float("-inf")
        self._closed = False
        self.outbox = Outbox()
        self.parks = False
        self.salt = b""

    def hear(self, notice: Notice, asked_s: float) -> None:
        for history_id, incarnation in notice.given_up:
            self._holdings.give_up(history_id, incarnation)
        for history_id, incarnation in notice.ended:
            self._holdings.drop(history_id, incarnation)
        self.parks, self.salt = notice.parks, notice.salt
        self.outbox.obeyed(notice.number)
        self._until_s = max(self._until_s, asked_s + LEASE_S)

    def stop(self) -> None:
        """Begin nothing until the table is heard of again: it does not know this decoder."""
        self._until_s = float("-inf")
        self.outbox.close()

    def close(self) -> None:
        self._closed = True

    def begin(
        self, asked: Continued, router_id: str, now_s: float, waiting_tokens: int = 0
    ) -> TurnKey | None:
        """Begin a turn; None means that its router has to ask the table.

        With host memory, any decoder can continue a history: then turns that would wait here for
        ``waiting_tokens`` of others' prompts are the table's to place.
        """
        if self._closed or now_s >= self._until_s or self.outbox.is_full:
            return None
        if self.parks and waiting_tokens >= LARGE_TOKENS:
            return None
        held = self._holdings.continued(asked.root, asked.end, asked.conversation_id)
        if held is None or now_s - held.last_used_s >= self._longest_idle_s:
            return None
        # No turn of this history runs. It gets a number of the table's whenever it comes to a
        # decoder, so numbers are unique.
        if not is_direct(held.finished + 1):
            return None
        turn = TurnKey(held.id, held.incarnation, held.finished + 1)
        self._holdings.begin(turn)
        self.outbox.add(Began(turn, router_id, self.parks))
        return turn
