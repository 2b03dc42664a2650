"""The table agrees with a naive model in any order of events."""

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve import identity
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.histories.prefixes import mark
from conserve.history import History, State
from conserve.placement import ConversationPlacement
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import (
    IDLE_S,
    TURN_S,
    Turn,
    chain,
    held,
    listed,
    stats,
    the,
)


@dataclass
class Known:
    """A conversation in the naive model."""

    incarnation: int
    last_used_s: float
    decoder: str | None = None
    held: int = 0
    turns: int = 0
    moves: int = 0
    running: set[int] = field(default_factory=set)
    prefill: tuple[str, int] | None = None
    reached: bool = False
    tails: tuple[bytes, ...] = ()
    finished: int = 0
    promised: bool = False


UNNAMED = ["conv-" + digit * 24 for digit in "123"]
NAMES = ["a", "one\ta", "one\tb", "two\ta", "two\tc", *UNNAMED]
IDS = st.sampled_from(NAMES)
TENANTS = ("", "one", "two")
# Marks of their first prompts: tails, until there is an answer.
ROOTS = {mark(chain(name).root) for name in NAMES}
TOKENS = st.integers(1, 400)
DIGESTS = st.sampled_from([b"x" * 16, b"y" * 16, b"z" * 16])
DECODER_IDS = st.sampled_from(["d1", "d2", "d3"])
PREFILLER_IDS = st.sampled_from(["p1", "p2"])
CAPACITY = {"d1": 800, "d2": 1000, "d3": 500}


class AnyOrder(RuleBasedStateMachine):
    """The table against a model that adds everything up anew each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first_id = 1
        self.table = ConversationTable(ConversationPlacement(), IDLE_S, TURN_S)
        self.known: dict[str, Known] = {}
        self.decoders: set[str] = set()
        self.prefillers: set[str] = set()
        self.history: list[Turn] = []
        self.accounts: dict[str, list[History]] = {}  # of decoders that are away
        self.now_s = 0.0

    # What the model says.

    def on(self, decoder_id: str) -> list[Known]:
        return [k for k in self.known.values() if k.decoder == decoder_id]

    def tokens_on(self, decoder_id: str) -> int:
        return sum(k.held for k in self.on(decoder_id))

    def current(self, reported: Turn) -> Known | None:
        known = self.known.get(reported.history_id)
        return known if known and known.incarnation == reported.incarnation else None

    def started(self, history_id: str) -> None:
        started = Turn.last(self.table, history_id)
        assert all(started.id != earlier.id for earlier in self.history)
        self.history.append(started)
        known = self.known[history_id]
        known.running.add(started.id)
        known.last_used_s = self.now_s

    def ended(self, known: Known, reported: Turn, seen: TurnStats | None) -> None:
        known.running.discard(reported.id)
        known.finished = max(known.finished, reported.id)
        known.prefill = None
        known.last_used_s = self.now_s
        if seen is not None:
            known.reached = True
            known.promised = False
            known.held = seen.prompt_tokens + seen.output_tokens

    # What happens.

    @rule(seconds=st.sampled_from([0.5, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(history_id=IDS, tokens=TOKENS)
    def bind(self, history_id: str, tokens: int) -> None:
        known = self.known.get(history_id)
        if known is not None and known.decoder is not None:
            with pytest.raises(ValueError, match="is bound"):
                self.table.bind(history_id, tokens, self.now_s)
            return
        fitting = {
            d: self.tokens_on(d) / CAPACITY[d]
            for d in self.decoders
            if not self.on(d) or self.tokens_on(d) + tokens <= CAPACITY[d]
        }
        opening = Opening(chain(history_id))
        placement = self.table.bind(history_id, tokens, self.now_s, opening=opening)
        if placement is None:
            assert not fitting
            return
        assert fitting[placement.decoder_id] == min(fitting.values())
        assert (placement.prefiller_id is None) == (not self.prefillers)
        if known is None:
            incarnation = the(self.table, history_id).incarnation
            known = self.known[history_id] = Known(incarnation, self.now_s)
        else:
            known.moves += 1
        known.decoder, known.held, known.promised = placement.decoder_id, tokens, True
        known.prefill = (placement.prefiller_id, tokens) if placement.prefiller_id else None
        self.started(history_id)

    @rule(history_id=IDS)
    def begin(self, history_id: str) -> None:
        known = self.known.get(history_id)
        begun = self.table.begin(history_id, self.now_s)
        assert (begun is not None) == (known is not None and known.decoder is not None)
        if begun is not None:
            self.started(history_id)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        reported = data.draw(st.sampled_from(self.history))
        self.table.prefilled(reported.key)
        known = self.current(reported)
        if known is not None:
            known.prefill = None

    @precondition(lambda self: self.history)
    @rule(data=st.data(), tokens=TOKENS, tails=st.lists(DIGESTS, max_size=2, unique=True))
    def advance(self, data: st.DataObject, tokens: int, tails: list[bytes]) -> None:
        reported = data.draw(st.sampled_from(self.history))
        known = self.current(reported)
        counts = (
            known is not None
            and known.decoder == reported.decoder_id
            and (reported.id in known.running or reported.id > known.finished)
        )
        assert reported.advance(self.table, tokens, tuple(tails), self.now_s) == counts
        if known is not None and counts:
            known.turns += 1
            known.tails = tuple(map(mark, tails)) or known.tails
            self.ended(known, reported, stats(tokens))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), tokens=st.none() | TOKENS)
    def abandon(self, data: st.DataObject, tokens: int | None) -> None:
        reported = data.draw(st.sampled_from(self.history))
        known = self.current(reported)
        seen = None if tokens is None else stats(tokens)
        ended = reported.abandon(self.table, seen, self.now_s)
        if known is not None and (
            reported.id in known.running
            or (seen and reported.id > known.finished and reported.decoder_id == known.decoder)
        ):
            self.ended(known, reported, seen)
        unreachable = reported.history_id in UNNAMED and known and not known.turns
        nothing_left = (
            known is not None and not known.running and bool(not known.reached or unreachable)
        )
        assert (ended is not None) == nothing_left
        if nothing_left:
            del self.known[reported.history_id]
        elif known is not None and not known.running and known.promised:
            known.decoder, known.held, known.promised = None, 0, False

    @rule(history_id=IDS)
    def release(self, history_id: str) -> None:
        released = self.table.release(history_id)
        assert (released is not None) == (self.known.pop(history_id, None) is not None)

    @rule()
    def expire(self) -> None:
        idle = {
            i
            for i, k in self.known.items()
            if k.last_used_s + IDLE_S + (TURN_S if k.running else 0) <= self.now_s
        }
        ended = self.table.expire(self.now_s)
        assert {c.id for c in ended} == idle
        assert [c.last_used_s for c in ended] == sorted(c.last_used_s for c in ended)
        for history_id in idle:
            del self.known[history_id]

    @rule(prefiller_id=PREFILLER_IDS)
    def add_prefiller(self, prefiller_id: str) -> None:
        self.table.add_prefiller(prefiller_id)
        self.prefillers.add(prefiller_id)

    @rule(prefiller_id=PREFILLER_IDS)
    def remove_prefiller(self, prefiller_id: str) -> None:
        self.table.remove_engine(prefiller_id)
        self.prefillers.discard(prefiller_id)
        for known in self.known.values():
            if known.prefill and known.prefill[0] == prefiller_id:
                known.prefill = None

    def account_of(self, decoder_id: str, arrived: bool = True) -> list[History]:
        """The decoder's report of what it holds.

        Args:
            arrived: whether the turns under way have reached it.
        """
        account = []
        for conversation in self.table.live():
            if conversation.home == decoder_id:
                own = copy.copy(conversation)
                if not arrived:
                    own.running = ()
                    if own.last_turn is None:
                        continue
                own.prefiller_id, own.prefill_tokens, own.home = None, 0, None
                own.moves = 0
                if own.promised:
                    own.held_tokens = 0  # a decoder has not heard of what was promised for it
                account.append(own)
        return account

    def adopted(self, decoder_id: str, account: list[History]) -> list[str]:
        """Take an account over into the model; return histories that live elsewhere or ended."""
        foreign = []
        for own in account:
            known = self.known.get(own.id)
            if known is None and own.incarnation >= self.first_id:
                foreign.append(own.id)
                continue
            if known is not None and (known.decoder or known.incarnation != own.incarnation):
                foreign.append(own.id)
                continue
            self.known[own.id] = Known(
                own.incarnation,
                own.last_used_s,
                decoder_id,
                own.held_tokens,
                max(own.turns, known.turns if known else 0),
                known.moves if known else 0,
                set(own.running),
                None,
                own.last_turn is not None,
                tuple(tail for tail in own.tails if tail not in ROOTS),
                own.finished,
            )
        return foreign

    @rule(decoder_id=DECODER_IDS, remembers=st.booleans())
    def add_decoder(self, decoder_id: str, remembers: bool) -> None:
        """A new decoder, or one that was thought lost and comes back with what it holds."""
        if decoder_id in self.decoders:
            return
        account = self.accounts.pop(decoder_id, [])
        if not remembers:
            account = []
        self.decoders.add(decoder_id)
        given = [copy.copy(own) for own in account]
        foreign = self.table.add_decoder(decoder_id, CAPACITY[decoder_id], given)
        assert foreign == self.adopted(decoder_id, account)

    @rule(decoder_id=DECODER_IDS)
    def remove_decoder(self, decoder_id: str) -> None:
        if decoder_id in self.decoders:
            self.accounts[decoder_id] = self.account_of(decoder_id)
        unbound = self.table.remove_engine(decoder_id)
        self.decoders.discard(decoder_id)
        assert sorted(unbound) == sorted(
            i for i, k in self.known.items() if k.decoder == decoder_id
        )
        for known in self.on(decoder_id):
            known.decoder, known.held = None, 0
            known.finished = max(known.finished, *known.running, 0)
            known.running.clear()

    @rule(order=st.permutations(sorted(CAPACITY)), arrived=st.booleans())
    def lose_the_table(self, order: list[str], arrived: bool) -> None:
        accounts = {d: self.account_of(d, arrived) for d in order if d in self.decoders}
        highest = max((t.id for t in self.history), default=0)
        self.first_id = highest + 1
        self.table = ConversationTable(ConversationPlacement(), IDLE_S, TURN_S, self.first_id)
        self.known.clear()
        for prefiller_id in self.prefillers:
            self.table.add_prefiller(prefiller_id)
        for decoder_id, account in accounts.items():
            given = [copy.copy(own) for own in account]
            assert self.table.add_decoder(decoder_id, CAPACITY[decoder_id], given) == []
            self.adopted(decoder_id, account)

    @rule(digest=DIGESTS, history_id=IDS)
    def recognise(self, digest: bytes, history_id: str) -> None:
        known = self.known.get(history_id)
        found = self.table.recognise(chain(history_id, [digest]), history_id)
        idle = known is not None and not known.running
        continued = idle and known is not None and mark(digest) in known.tails
        # Without any, all that it has is its first prompt, which its client tries again.
        tried_again = idle and known is not None and not known.tails
        assert found == (history_id if continued or tried_again else None)
        if history_id in UNNAMED:
            unnamed = self.table.recognise(chain(history_id, [digest]))
            assert unnamed == (history_id if continued else None)

    # What must hold after each.

    @invariant()
    def each_conversation_is_as_the_model_has_it(self) -> None:
        assert len(self.table) == len(self.known)
        for history_id, known in self.known.items():
            conversation = the(self.table, history_id)
            assert conversation.home == known.decoder
            assert conversation.incarnation == known.incarnation
            assert conversation.held_tokens == known.held
            assert conversation.turns == known.turns
            assert conversation.moves == known.moves
            assert set(conversation.running) == known.running
            assert conversation.finished == known.finished
            assert conversation.last_used_s == known.last_used_s
            state = State.BOUND if known.decoder else State.UNBOUND
            assert conversation.state is (State.RUNNING if known.running else state)

    @invariant()
    def each_decoder_holds_its_conversations_tokens(self) -> None:
        assert set(self.table.decoders) == self.decoders
        for decoder_id, (tokens, conversations) in held(self.table).items():
            assert tokens == self.tokens_on(decoder_id)
            assert conversations == len(self.on(decoder_id))

    @invariant()
    def each_prefiller_has_its_pending_prefills_queued(self) -> None:
        queued = dict.fromkeys(self.prefillers, 0)
        for known in self.known.values():
            if known.prefill is not None and known.prefill[0] in queued:
                queued[known.prefill[0]] += known.prefill[1]
        assert {p.id: p.queued_tokens for p in self.table.prefillers.values()} == queued

    @invariant()
    def each_conversation_is_to_be_looked_at(self) -> None:
        assert set(listed(self.table)) >= set(self.known)
        assert self.table._idleness._listed == len(listed(self.table))

    @invariant()
    def reasoning_ones_are_counted(self) -> None:
        assert self.table.reasoning == sum(bool(k.running) for k in self.known.values())

    @invariant()
    def each_tenant_has_what_its_conversations_have(self) -> None:
        for tenant in TENANTS:
            mine = [k for i, k in self.known.items() if i.rpartition("\t")[0] == tenant]
            usage = self.table.usage.tenant(tenant)
            assert usage.conversations == len(mine)
            assert usage.held_tokens == sum(k.held for k in mine)
            assert usage.turns == sum(len(k.running) for k in mine)
            if tenant:
                own = [c for c in self.table.live() if identity.tenant_of(c.id) == tenant]
                assert len(own) == len(mine)

    def teardown(self) -> None:
        for history_id in list(self.known):
            self.table.release(history_id)
        assert len(self.table) == self.table.reasoning == self.table.active(self.now_s) == 0
        assert set(held(self.table).values()) <= {(0, 0)}
        assert not any(p.queued_tokens for p in self.table.prefillers.values())
        for id in ("a", "one\ta", *UNNAMED):
            said = chain(id, [b"x" * 16, b"y" * 16, b"z" * 16])
            assert self.table.recognise(said, id) is None
            assert self.table.recognise(said) is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
