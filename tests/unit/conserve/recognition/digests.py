"""Digests of turns, as routers and decoders compute them."""

from collections.abc import Mapping, Sequence
from typing import Any

from conserve.recognition import Digest, chain_of


def candidate_digests(
    messages: Sequence[Mapping[str, Any]], tenant: str | None = None
) -> list[Digest]:
    """Return the tails that these messages may continue, longest first."""
    return list(chain_of(messages, tenant=tenant).ends)


def tail_digest(
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tenant: str | None = None,
) -> Digest:
    """Return the digest of a finished turn: its messages, then its answer."""
    return chain_of(messages, tenant=tenant).beginning.tails(answer)[0]
