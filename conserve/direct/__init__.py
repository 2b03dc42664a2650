"""State of routers, decoders and the table for later turns that do not ask the table.

docs/later-turns.md has the protocol.
"""

from conserve.direct.desk import LEASE_S, Began, Continued, Desk, Ended, Outbox, Report, is_direct
from conserve.direct.homes import LARGE_TOKENS, Home, Homes
from conserve.direct.notices import Notice, Notices
