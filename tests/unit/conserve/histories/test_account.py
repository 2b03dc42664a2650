"""Decoders hold the tokens of distinct chains, also by brute force."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve import identity
from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.placement import NOTHING_SHARED, Placement, PlacementPolicy, Shared
from conserve.recognition import chain_of
from conserve.recognition.apis import heard
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import Turn, the

IDLE_S = 1000.0
# What a message is long, in tokens: another length for each, so that sums tell them apart.
SYSTEMS = {"s": 101, "t": 203}
USERS = {"u": 7, "v": 11, "w": 13}
ANSWERS = {"a": 17, "b": 19}
PATHS = (CHAT, MESSAGES, RESPONSES)
Messages = tuple[tuple[str, str], ...]


def tokens_of(messages: Messages) -> int:
    return sum({**SYSTEMS, **USERS, **ANSWERS}[text] for _, text in messages)


def spoken(messages: Messages) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in messages]


def asked_by(path: str, messages: Messages) -> dict[str, Any]:
    if path == MESSAGES:
        return {"system": messages[0][1], "messages": spoken(messages[1:])}
    if path == RESPONSES:
        return {"instructions": messages[0][1], "input": spoken(messages[1:])}
    return {"messages": spoken(messages)}


def common_of(one: Messages, other: Messages) -> Messages:
    both = zip(one, other, strict=False)
    return tuple(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], both))


@dataclass
class Known:
    """A history in the naive model.

    Attributes:
        messages: up to its newest answer.
        kv: the decoder's part of it, without an answer that was cut (`cut_tokens`).
    """

    messages: Messages
    decoder: str | None
    kv: Messages = ()
    cut_tokens: int = 0
    # All beginnings whose length the table has heard of.
    points: set[Messages] = field(default_factory=set)
    turn: Turn | None = None
    asked: Messages = ()
    promised: bool = True

    @property
    def held(self) -> Messages:
        return self.asked if self.promised else self.kv

    @property
    def held_tokens(self) -> int:
        return tokens_of(self.held) + (0 if self.promised else self.cut_tokens)


class Anywhere(PlacementPolicy):
    """A policy that goes where it is told to."""

    def __init__(self) -> None:
        self.decoder_id = "d1"

    def place(
        self,
        prompt_tokens: int,
        decoders: object,
        prefillers: object,
        shared: Shared = NOTHING_SHARED,
        now_s: float = 0.0,
    ) -> Placement | None:
        self.shared = shared
        return Placement(self.decoder_id, None)


class Trees(RuleBasedStateMachine):
    """Conversations that begin alike, diverge, end and lose their decoders, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Anywhere()
        policy: PlacementPolicy = self.policy
        self.table = ConversationTable(policy, IDLE_S)
        self.known: dict[str, Known] = {}
        self.lost = False
        for id in ("d1", "d2"):
            self.table.add_decoder(id, 10**6)

    # What the model says.

    def on(self, decoder_id: str) -> list[Known]:
        return [one for one in self.known.values() if one.decoder == decoder_id]

    def distinct(self, decoder_id: str, common: Callable[[Known, Known], int]) -> int:
        """Sum what is beyond the longest beginning that each history has in common with any."""
        held = 0
        counted: list[Known] = []
        for one in self.on(decoder_id):
            held += one.held_tokens - max((common(one, other) for other in counted), default=0)
            counted.append(one)
        return held

    @staticmethod
    def said_alike(one: Known, other: Known) -> int:
        return tokens_of(common_of(one.held, other.held))

    @staticmethod
    def known_alike(one: Known, other: Known) -> int:
        """Return the common beginning that the table knows of both, and its length in both."""
        common = max(map(tokens_of, one.points & other.points), default=0)
        common = min(common, one.held_tokens, other.held_tokens)
        system = one.held[:1]
        if system == other.held[:1]:
            common = max(common, tokens_of(system))
        return common

    # What happens.

    @rule(
        system=st.sampled_from([*SYSTEMS]), user=st.sampled_from([*USERS]),
        decoder=st.sampled_from(["d1", "d2"]), path=st.sampled_from(PATHS),
    )  # fmt: skip
    def begin(self, system: str, user: str, decoder: str, path: str) -> None:
        self.turn((("system", system), ("user", user)), decoder, path)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(), user=st.sampled_from([*USERS]), decoder=st.sampled_from(["d1", "d2"]),
        path=st.sampled_from(PATHS),
    )  # fmt: skip
    def go_on_or_back(self, data: st.DataObject, user: str, decoder: str, path: str) -> None:
        one = self.known[data.draw(st.sampled_from([*self.known]))]
        ends = [i + 1 for i, (role, _) in enumerate(one.messages) if role == "assistant"]
        if ends:
            end = data.draw(st.sampled_from(ends))
            self.turn((*one.messages[:end], ("user", user)), decoder, path)

    def turn(self, messages: Messages, decoder: str, path: str) -> None:
        chain = chain_of(*heard(path, asked_by(path, messages)))
        found = self.table.recognise(chain)
        # The longest beginning that is all of a history decides; a busy one is left there.
        longest: Messages = ()
        for one in self.known.values():
            its = one.messages
            if its and messages[: len(its)] == its and len(its) > len(longest):
                longest = its
        owners = {i: one for i, one in self.known.items() if one.messages == longest != ()}
        idle = {i for i, one in owners.items() if one.turn is None}
        assert found in (idle or {None})  # type: ignore[arg-type]
        if found is not None and self.known[found].decoder is not None:
            assert self.table.begin(found, 0) is not None
            known = self.known[found]
        else:
            found = found or identity.new_id()
            opening = Opening(chain, SYSTEMS[messages[0][1]])
            self.policy.decoder_id = decoder
            assert self.table.bind(found, tokens_of(messages), 0, opening=opening) is not None
            known = self.known.setdefault(found, Known((), decoder))
            ends = self.beginnings(messages)
            kin = [one for one in self.on(decoder) if one is not known]
            known.points |= {m for m in ends if any(m in one.points for one in kin)}
            if not known.points and len(ends) == 1:
                known.points = {messages}
            known.decoder, known.promised = decoder, True
        known.turn = Turn.last(self.table, found)
        known.asked = messages

    @staticmethod
    def beginnings(messages: Messages) -> list[Messages]:
        """Return the first prompt, and all up to the end of each answer."""
        first = next(
            (i for i, (role, _) in enumerate(messages) if role == "assistant"), len(messages)
        )
        ends = [i + 1 for i, (role, _) in enumerate(messages) if role == "assistant"]
        return [messages[:first], *(messages[:end] for end in ends)]

    @precondition(lambda self: any(one.turn for one in self.known.values()))
    @rule(
        data=st.data(), answer=st.sampled_from([*ANSWERS]), path=st.sampled_from(PATHS),
        evicted=st.booleans(),
    )  # fmt: skip
    def finish(self, data: st.DataObject, answer: str, path: str, evicted: bool) -> None:
        """A turn is answered by an engine that may have lost what the account says."""
        running = [i for i, one in self.known.items() if one.turn]
        one = self.known[data.draw(st.sampled_from(running))]
        assert one.turn is not None
        said = (*one.asked, ("assistant", answer))
        base = the(self.table, one.turn.history_id).base
        # On a further turn, all that was there; on the first, what others had there.
        cached = 0 if base is None else base.tokens
        if not one.promised:
            cached = tokens_of(common_of(one.kv, one.asked))
        stats = TurnStats(tokens_of(one.asked), ANSWERS[answer], 0 if evicted else cached, 0)
        beginning = chain_of(*heard(path, asked_by(path, one.asked))).beginning
        tail = beginning.tails(spoken(said)[-1])[0]
        assert self.table.advance(one.turn.key, one.turn.decoder_id, stats, (tail,), 0)
        one.messages, one.turn, one.promised = said, None, False
        one.kv, one.cut_tokens = said, 0
        one.points.add(said)
        if evicted:
            self.learn_who_has_lost(one)

    def learn_who_has_lost(self, one: Known) -> None:
        """Idle histories that began with the same have lost it, too."""
        for id, other in self.known.items():
            held = other is not one and other.decoder is not None and other.held_tokens
            if held and the(self.table, id).held_tokens == 0:
                assert other.turn is None
                assert other.messages[:2] == one.messages[:2]
                other.kv, other.cut_tokens = (), 0
                self.lost = True

    @precondition(lambda self: any(one.turn for one in self.known.values()))
    @rule(data=st.data(), reached=st.booleans())
    def cut(self, data: st.DataObject, reached: bool) -> None:
        """A turn's client leaves before or during the answer."""
        running = [i for i, one in self.known.items() if one.turn]
        id = data.draw(st.sampled_from(running))
        one = self.known[id]
        assert one.turn is not None
        cached = 0 if one.promised else tokens_of(common_of(one.kv, one.asked))
        stats = TurnStats(tokens_of(one.asked), 5, cached, 0) if reached else None
        ended = self.table.abandon(one.turn.key, one.turn.decoder_id, stats, 0)
        # Without an answer no client can come back to it.
        assert (ended is not None) == (not one.messages)
        one.turn = None
        if ended is not None:
            del self.known[id]
        elif reached:
            one.kv, one.cut_tokens, one.promised = one.asked, 5, False
        elif one.promised:
            one.decoder, one.promised, one.kv = None, False, ()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([*self.known]))
        assert self.table.release(id) is not None
        del self.known[id]

    @rule(decoder=st.sampled_from(["d1", "d2"]))
    def lose(self, decoder: str) -> None:
        self.table.remove_engine(decoder)
        self.table.add_decoder(decoder, 10**6)
        for id, one in list(self.known.items()):
            if one.decoder == decoder:
                one.decoder = one.turn = None
                one.kv, one.cut_tokens, one.promised = (), 0, False
                if not one.messages:
                    # No client can come back to it.
                    self.table.release(id)
                    del self.known[id]

    # What must hold after each.

    @invariant()
    def decoders_hold_distinct_chains(self) -> None:
        for decoder_id, decoder in self.table.decoders.items():
            # What two have in common may be known from a third. Once some have lost theirs, it may
            # not be known of all that are left: too much is counted then, never too little.
            alike = self.known_alike if not self.lost else lambda one, other: 0
            most = self.distinct(decoder_id, alike)
            assert self.distinct(decoder_id, self.said_alike) <= decoder.held_tokens <= most
        held = sum(decoder.held_tokens for decoder in self.table.decoders.values())
        assert self.table.usage.tenant("").held_tokens == held

    def teardown(self) -> None:
        for id in list(self.known):
            self.table.release(id)
        assert all(one.held_tokens == 0 for one in self.table.decoders.values())
        assert not self.table._live.kinship.sharing._systems


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
