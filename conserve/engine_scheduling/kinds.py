"""Tells what a call is to an engine: cold, resume or decode."""

from typing import Final, Literal

Kind = Literal["cold", "resume", "decode"]
KINDS: Final[tuple[Kind, ...]] = ("cold", "resume", "decode")
WaitFor = Literal["room", "place", "step", "load"]
"""What a call waits for in an engine: KV that is free, its turn among as many as run at a time,
tokens of a step, or its own KV, which is being loaded."""


def kind_of(is_decoding: bool, found_tokens: int, missing_tokens: int, budget_tokens: int) -> Kind:
    """Return what a call is (AgentServe, algorithm 1, lines 11 to 16).

    Decodes and short appends run together; cold prefills, and appends longer than the budget, are
    what decodes have to be kept from. Tokens count that caches do not have: an append of 56 tokens
    to a history whose last block was not full may be 79 to compute. Line 13 of the algorithm goes
    by length alone; the paper's prose has cold prompts apart whatever their length, and so has
    this.

    Args:
        is_decoding: whether it is past its first token.
        found_tokens: of its prompt, what caches have.
        missing_tokens: the rest.
        budget_tokens: what a step may prefill beside decodes.

    Example:
        >>> kind_of(False, found_tokens=3_000, missing_tokens=79, budget_tokens=256)
        'resume'
        >>> kind_of(False, found_tokens=0, missing_tokens=79, budget_tokens=256)
        'cold'
        >>> kind_of(False, found_tokens=3_000, missing_tokens=900, budget_tokens=256)
        'cold'
    """
    if is_decoding:
        return "decode"
    return "resume" if found_tokens > 0 and missing_tokens <= budget_tokens else "cold"
