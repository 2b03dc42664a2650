"""Recognises a conversation by its messages, for agents that send no conversation id.

After each turn the digest of its messages and answer is kept as the history's *tail*
(`Beginning.tails`). When a turn comes, the digests of its beginnings are looked up among the tails,
longest first (`TailIndex.match`). Agents do not echo answers byte for byte, so only a message's
meaning for the model is hashed: role, text, and tool calls by name and arguments.
"""

from conserve.recognition.answers import answers_from_body, answers_from_stream
from conserve.recognition.chain import Beginning, Chain, Digest, TailIndex, chain_of
