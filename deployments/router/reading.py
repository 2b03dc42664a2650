"""Bodies: long ones are understood in a thread, one at a time, beside everybody's tokens."""

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from conserve.errors import ApiError

_SHORT_TIMEOUT_S = 30.0

_SMALL_BYTES = 16 * 1024
_READER = ThreadPoolExecutor(1, "reader")

# How half a surrogate pair begins, in a pair too, where it is escaped and where it is not.
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCODED = re.compile(rb"\xed[\xa0-\xbf]")
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Runs of escaped backslashes, after which another escape may begin; of pairs; and of halves.
_ESCAPES = re.compile(
    rb"(?:\\\\)+|(?:%(high)b%(low)b)+|((?:%(high)b(?!%(low)b)|%(low)b)+)"
    % {b"high": _HIGH, b"low": _LOW}
)
_HALF_BYTES = 6  # Of the escape of one.

_T = TypeVar("_T")


async def understood(length: int, function: Callable[..., _T], *arguments: Any) -> _T:
    """Return what a function makes of a body.

    Args:
        length: of the body, in bytes; where it is small, the function is called at once.
    """
    if length <= _SMALL_BYTES:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_READER, function, *arguments)


def whole_characters(raw: bytes) -> bytes:
    """Put U+FFFD in the place of each half of a surrogate pair in a JSON text.

    Clients cut texts within a pair (JavaScript's by their length), or have them from bytes that are
    no text. Python's JSON takes a half, and no tokenizer does: vLLM 0.29 refuses the request, and
    as the half stays in the history, each later one. Recognition counts both as the same.

    Args:
        raw: in UTF-8; what is no JSON stays none.
    """
    if not raw.isascii() and _ENCODED.search(raw):
        try:
            text = raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw
        # Two halves that were encoded one by one are a pair, too.
        pairs = text.encode("utf-16-le", "surrogatepass")
        raw = pairs.decode("utf-16-le", "replace").encode()
    return _ESCAPES.sub(_without_halves, raw) if _ESCAPED.search(raw) else raw


def _without_halves(escapes: re.Match[bytes]) -> bytes:
    halves = escapes[1]
    return escapes[0] if halves is None else rb"\ufffd" * (len(halves) // _HALF_BYTES)


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
        return json.loads(whole_characters(bytes(raw)) or empty)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
