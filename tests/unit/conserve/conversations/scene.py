"""A table of conversations, and helpers of its tests."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.history import History
from conserve.pausing import Pausing
from conserve.placement import ConversationPlacement, PlacementPolicy
from conserve.recognition import Chain
from conserve.turn import TurnKey, TurnStats

IDLE_S = 100.0
TURN_S = 150.0
# Marks, 8 bytes of each, tell them apart.
TAILS = (b"1" * 16,)
OTHER_TAILS = (b"2" * 16,)


def a_table(
    decoders: int = 2,
    prefillers: int = 1,
    capacity_tokens: int = 1000,
    policy: PlacementPolicy | None = None,
    pausing: Pausing | None = None,
) -> ConversationTable:
    table = ConversationTable(policy or ConversationPlacement(), IDLE_S, TURN_S, pausing=pausing)
    for i in range(1, decoders + 1):
        table.add_decoder(f"d{i}", capacity_tokens)
    for i in range(1, prefillers + 1):
        table.add_prefiller(f"p{i}")
    return table


def chain(name: str, ends: Sequence[bytes] = ()) -> Chain:
    """The chain of a turn that begins like this conversation."""
    root = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return Chain(root, None, tuple(ends), ends_with_root=not ends)


def the(table: ConversationTable, history_id: str) -> History:
    conversation = table.get(history_id)
    assert conversation is not None
    return conversation


def stats(prompt_tokens: int, output_tokens: int = 10) -> TurnStats:
    return TurnStats(prompt_tokens, output_tokens, 0, 0)


@dataclass(frozen=True)
class Turn:
    """A turn that was started, as its router and decoder know it."""

    history_id: str
    incarnation: int
    id: int
    decoder_id: str

    @classmethod
    def last(cls, table: ConversationTable, history_id: str) -> "Turn":
        conversation = the(table, history_id)
        assert conversation.home is not None
        return cls(
            history_id,
            conversation.incarnation,
            conversation.running[-1],
            conversation.home,
        )

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.history_id, self.incarnation, self.id)

    def advance(
        self, table: ConversationTable, prompt_tokens: int,
        tails: tuple[bytes, ...] = (), now_s: float = 0,
    ) -> bool:  # fmt: skip
        return table.advance(self.key, self.decoder_id, stats(prompt_tokens), tails, now_s)

    def abandon(
        self, table: ConversationTable, seen: TurnStats | None = None, now_s: float = 0
    ) -> History | None:
        return table.abandon(self.key, self.decoder_id if seen else None, seen, now_s)


def start(
    table: ConversationTable, history_id: str, prompt_tokens: int = 100, now_s: float = 0,
    like: str | None = None,
) -> Turn:  # fmt: skip
    """Start a turn of the conversation, which is bound first if necessary.

    Args:
        like: the conversation that it begins like; None for none.
    """
    if table.begin(history_id, now_s) is None:
        opening = Opening(chain(like or history_id))
        assert table.bind(history_id, prompt_tokens, now_s, opening=opening) is not None
    return Turn.last(table, history_id)


def turn(
    table: ConversationTable, history_id: str, prompt_tokens: int = 100,
    tails: tuple[bytes, ...] = (), now_s: float = 0, like: str | None = None,
) -> Turn:  # fmt: skip
    started = start(table, history_id, prompt_tokens, now_s, like)
    assert started.advance(table, prompt_tokens, tails, now_s)
    return started


def held(table: ConversationTable) -> dict[str, tuple[int, int]]:
    return {d.id: (d.held_tokens, d.conversations) for d in table.decoders.values()}


def binding(table: ConversationTable, history_id: str) -> str | None:
    return the(table, history_id).home


def listed(table: ConversationTable) -> list[str]:
    return [id for ids in table._idleness._looks.values() for id in ids]
