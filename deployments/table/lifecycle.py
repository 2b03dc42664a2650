"""How conversations stand, for whoever keeps something of theirs that goes when they end."""

from collections.abc import Collection, Iterable

from conserve import identity
from conserve.admission import Ticket
from conserve.conversations import ConversationTable
from conserve.environments import Standing


def standings(
    conversation_ids: Collection[str],
    table: ConversationTable,
    waiting: Iterable[Ticket],
    pending: Collection[str],
) -> dict[str, Standing]:
    """How these conversations stand; whoever is unknown is left out.

    Args:
        conversation_ids: as they are kept.
        waiting: who waits for room, who goes first first.
        pending: histories that are being placed.
    """
    asked = set(conversation_ids)
    found: dict[str, Standing] = {}
    for place, ticket in enumerate(waiting):
        conversation_id = identity.conversation_of(ticket.history_id)
        if conversation_id in asked:
            # Of several histories, the one that is served first.
            found.setdefault(conversation_id, Standing("waiting", place))
    placed = {identity.conversation_of(history_id) for history_id in pending}
    for conversation_id in asked:
        histories = table.histories(conversation_id)
        if any(one.decoder_id is not None for one in histories):
            found[conversation_id] = Standing("live")
        elif histories or conversation_id in placed:
            found.setdefault(conversation_id, Standing("live"))
    return found
