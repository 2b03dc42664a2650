"""How much a conversation has been served."""

from collections.abc import Iterable

from conserve.history import History


def attained_service(histories: Iterable[History]) -> int:
    """Return what has been computed for a conversation, each token once, in tokens.

    That is what its histories have grown to, prompts and outputs, less what they begin with as
    others do. What is computed again because its room was given away is no service that it asked
    for: counted, it would send whoever was paused to the end of the line, to be paused again. It
    needs no counter, so it outlives the table as the histories themselves do. (Autellix counts
    seconds on the GPU; these follow from tokens.)

    Args:
        histories: its live ones.

    Example:
        >>> from conserve.history import TurnStats
        >>> chat = History("c", 1, created_s=0.0, last_used_s=0.0)
        >>> attained_service([chat])
        0
        >>> chat.last_turn = TurnStats(900, 100, decoder_cached_tokens=0, lmcache_tokens=0)
        >>> attained_service([chat])
        1000
    """
    served = 0
    for one in histories:
        last = one.last_turn
        if last is not None:
            shared_tokens = 0 if one.base is None else one.base.tokens
            served += max(0, last.prompt_tokens + last.output_tokens - shared_tokens)
    return served
