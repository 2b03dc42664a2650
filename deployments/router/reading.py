"""Long bodies are understood in a thread, one at a time, beside everybody's tokens."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_SMALL_BYTES = 16 * 1024
_READER = ThreadPoolExecutor(1, "reader")

_T = TypeVar("_T")


async def understood(length: int, function: Callable[..., _T], *arguments: Any) -> _T:
    """What a function makes of a body.

    Args:
        length: of the body, in bytes; where it is small, the function is called at once.
    """
    if length <= _SMALL_BYTES:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_READER, function, *arguments)
