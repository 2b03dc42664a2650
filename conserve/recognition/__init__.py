"""Recognise a conversation by its messages, for agents that send no conversation id.

A turn continues the conversation whose last turn it begins with: that turn's messages, then its
answer. After each turn the digest of "messages plus answer" is kept as the conversation's *tail*
(``tail_digest``, ``TailIndex.add``); when a turn arrives, the digests of its beginnings
(``candidate_digests``) are looked up among the tails, longest first (``TailIndex.match``).

Agents do not echo answers byte for byte, so what is hashed is a message's meaning for the model:
role, text, and tool calls by name and arguments. Everything else is left out (ids, names,
reasoning, fields unknown here), because clients drop it, invent it or rewrite it.

Digests and the index are exact about what is left. A mistake costs little either way: an unknown
history is served as a new conversation.
"""

from conserve.recognition.answers import answers_from_body, answers_from_stream
from conserve.recognition.chain import (
    Beginning,
    Chain,
    Digest,
    candidate_digests,
    chain_of,
    tail_digest,
)
from conserve.recognition.index import TailIndex

__all__ = [
    "Beginning",
    "Chain",
    "Digest",
    "TailIndex",
    "answers_from_body",
    "answers_from_stream",
    "candidate_digests",
    "chain_of",
    "tail_digest",
]
