"""Checks that a request holds only numbers that the engine can send to its core."""

from collections.abc import Mapping
from typing import Any

# These become the prompt, or are compiled: their numbers are text then.
_AS_TEXT = frozenset(
    (
        *("messages", "prompt", "tools", "functions", "documents", "chat_template_kwargs"),
        *("response_format", "structured_outputs", "system", "input", "output_config", "text"),
    )
)
_LEAST, _MOST = -(2**63), 2**63 - 1


def beyond_64_bits(body: Mapping[str, Any]) -> str | None:
    """Return the first field of a turn with a whole number that takes more than 64 bits, if any.

    vLLM 0.29 accepts one for many parameters (``stream_interval``, ``vllm_xargs``, ...), and then
    cannot write it into the message for its core: 500.
    """
    for name, value in body.items():
        if name not in _AS_TEXT and _holds_one(value):
            return name
    return None


def _holds_one(value: Any) -> bool:
    open_ = [value]
    while open_:
        one = open_.pop()
        if isinstance(one, int) and not _LEAST <= one <= _MOST:
            return True
        if isinstance(one, dict):
            open_.extend(one.values())
        elif isinstance(one, list):
            open_.extend(one)
    return False
