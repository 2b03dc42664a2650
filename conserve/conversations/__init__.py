"""Live conversations: which decoder each is bound to, and what each decoder holds.

`ConversationTable` is the one authority for bindings. What happens once a turn is O(1) in the
number of conversations, unless room has to be made (`conserve.pausing`).
"""

from conserve.conversations.table import MEMORY_ENVIRONMENT, ConversationTable
