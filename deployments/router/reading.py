"""Bodies: long ones are understood in a thread, one at a time, beside everybody's tokens."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from conserve.errors import ApiError

_SHORT_TIMEOUT_S = 30.0

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


async def read_short(request: Request, most_bytes: int, empty: bytes = b"") -> Any:
    """The JSON of a request that is no turn.

    Args:
        empty: what a request without a body stands for.

    Raises:
        ApiError: it is longer than that, or slow, or is none.
    """
    raw = bytearray()
    try:
        async with asyncio.timeout(_SHORT_TIMEOUT_S):
            async for part in request.stream():
                raw += part
                if len(raw) > most_bytes:
                    raise ApiError(413, f"the body is longer than {most_bytes} bytes")
    except TimeoutError:
        raise ApiError(
            408, f"the request was not whole after {_SHORT_TIMEOUT_S:g} s", "timeout"
        ) from None
    try:
        return json.loads(raw or empty)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
