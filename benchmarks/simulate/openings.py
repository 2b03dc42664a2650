"""Tells the table's account what a recorded or drawn prompt begins with, as of a chat's."""

from hashlib import blake2b

from benchmarks.records import SharedPrefix
from conserve.histories.kinship import Opening
from conserve.recognition import Chain


def opening(conversation: str, shared: tuple[SharedPrefix, ...], first: bool) -> Opening | None:
    """Return what the live system would know of a prompt that begins so; None: it shares nothing.

    Tools and system messages are one part there, the longest prefix of these.

    Args:
        first: whether no turn of the conversation has been answered yet.
    """
    if not shared:
        return None
    whole = shared[-1]
    chain = Chain(_digest(conversation), _digest(*whole), (), ends_with_root=first)
    return Opening(chain, whole.tokens)


def _digest(*what: str | int) -> bytes:
    return blake2b(repr(what).encode(), digest_size=16).digest()
