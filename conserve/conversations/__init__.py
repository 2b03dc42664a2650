"""Live conversations: which decoder each is bound to, and what each decoder holds.

The one authority for bindings, as plain data structures: no Ray, no clock (time is an
argument), and whatever happens once a turn is O(1) in the number of conversations, but where room
has to be made (`conserve.pausing`). Occupancy is exact by construction: a decoder's
``held_tokens`` is changed in `Ledger._charge` alone. What each tenant has is counted at the same
place.

`table` is what others use. Behind it `ledger` counts, `live` finds histories and `engines` knows
those; `turns`, `appends`, `binding`, `membership` and `ending` are what happens to them.
"""

from conserve.conversations.table import MEMORY_ENVIRONMENT, ConversationTable

__all__ = ["MEMORY_ENVIRONMENT", "ConversationTable"]
