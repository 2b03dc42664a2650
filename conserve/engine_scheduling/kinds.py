"""Classifies an engine's calls as cold, resume or decode."""

from typing import Final, Literal

Kind = Literal["cold", "resume", "decode"]
KINDS: Final[tuple[Kind, ...]] = ("cold", "resume", "decode")
WaitFor = Literal["room", "place", "step", "load"]
"""What a call waits for in an engine: free KV, one of the places of calls that run, tokens of a
step, or its own KV, which is being loaded."""


def kind_of(is_decoding: bool, found_tokens: int, missing_tokens: int, budget_tokens: int) -> Kind:
    """Classify a call (AgentServe, algorithm 1, lines 11 to 16).

    Args:
        found_tokens: of its prompt, what caches have.
        missing_tokens: the rest; an append computes up to a block more than it is long.
        budget_tokens: what a step may prefill beside decodes.
    """
    if is_decoding:
        return "decode"
    return "resume" if found_tokens > 0 and missing_tokens <= budget_tokens else "cold"
