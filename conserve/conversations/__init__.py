"""Live conversations: which decoder each is bound to, and what each decoder holds.

The one authority for bindings. What happens once a turn is O(1) in the number of conversations,
unless room has to be made (`conserve.pausing`). Occupancy is exact, since only `Ledger._charge`
changes a decoder's ``held_tokens``, and what its tenant holds.

`ConversationTable` is what others use.
"""

from conserve.conversations.table import MEMORY_ENVIRONMENT, ConversationTable

__all__ = ["MEMORY_ENVIRONMENT", "ConversationTable"]
