"""Helpers of tests with a table that pauses."""

from typing import Any

from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.pausing import Memory, Pausing
from conserve.placement import Placement
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import Turn, a_table, chain, start, the

LONG_AGO_S, NOW_S = 10.0, 1000.0


def paused(table: ConversationTable) -> set[str]:
    return {one.id for one in table.live() if one.home is None}


def memory_of(table: ConversationTable) -> Memory:
    assert table.memory is not None
    return table.memory


def tail(name: str) -> tuple[bytes]:
    return (name.encode().ljust(16, b"-"),)


def bound(
    table: ConversationTable, name: str, tokens: int, now_s: float = NOW_S, **more: Any
) -> Placement:
    """Bind a history, for which there is room."""
    placement = table.bind(name, tokens, now_s, **more)
    assert placement is not None
    return placement


def ends(table: ConversationTable, name: str, seen: TurnStats, now_s: float = NOW_S) -> None:
    """End the history's newest turn, of which its engine has seen this."""
    turn = Turn.last(table, name)
    assert table.advance(turn.key, turn.decoder_id, seen, tail(name), now_s)


def calls(table: ConversationTable, name: str, tool: str | None, now_s: float) -> None:
    """End the history's newest turn with a call of this tool."""
    ends(table, name, TurnStats(100, 10, 0, 0, tool), now_s)


def idle(table: ConversationTable, name: str, tokens: int, now_s: float = LONG_AGO_S) -> None:
    """An idle history of this many tokens."""
    start(table, name, tokens, now_s)
    ends(table, name, TurnStats(tokens - 10, 10, 0, 0), now_s)


def alike(table: ConversationTable, name: str, tokens: int, seen: TurnStats) -> None:
    """An idle history that begins as all others of these do."""
    bound(table, name, tokens, LONG_AGO_S, opening=Opening(chain("x")))
    ends(table, name, seen, LONG_AGO_S)


def relieve(table: ConversationTable, now_s: float = NOW_S) -> None:
    for decoder in table.decoders.values():
        memory_of(table).relieve(decoder, table.decoders.values(), now_s)


def parking(table: ConversationTable, name: str, tokens: int, now_s: float = NOW_S) -> bool:
    """Run a turn of a history, and return whether it left its prompt in host memory."""
    start(table, name, tokens, now_s)
    parks = table.park(the(table, name))
    found = the(table, name).held_tokens if the(table, name).turns else 0
    ends(table, name, TurnStats(tokens - 10, 10, found, 0), now_s)
    return parks


def a_parking_table(decoders: int = 1, host_tokens: int = 10_000) -> ConversationTable:
    table = a_table(decoders=decoders, pausing=Pausing())
    memory_of(table).set_host_tokens(host_tokens)
    return table
