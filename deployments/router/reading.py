"""Reads the bodies of requests, and writes them anew for engines.

Long ones are understood in a thread, one at a time, beside other turns' tokens.
"""

import asyncio
import contextlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from conserve import budget, media
from conserve.apis import COMPLETIONS, DETOKENIZE, TOKENIZE
from conserve.errors import ApiError
from conserve.media import Lifted
from conserve.settings import Settings
from deployments.router.errors import CODINGS, UNKNOWN_CODING

_TIMEOUT_S = 120.0
_SHORT_TIMEOUT_S = 30.0
# What is longer than this comes in no faster: 8 MiB in half a second.
_UNPACED_BYTES = 256 * 1024
_PACE_BYTES_S = 16 * 1024 * 1024
_SMALL_BYTES = 16 * 1024
_READER = ThreadPoolExecutor(1, "reader")
# Images are decoded here, so that no other body waits for them.
_MEDIA = ThreadPoolExecutor(1, "media")
_SPACE = re.compile(r"[ \t\n\r]*")

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


async def lifted_body(raw: bytes, settings: Settings) -> Lifted:
    """Set the data of a body's media aside; raises ApiError (413) if the rest is too long."""
    lifted = Lifted(b"")
    lifted.raw = await lifted_text(raw, lifted)
    if len(lifted.raw) > settings.max_body_bytes:
        raise too_long(settings.max_body_bytes)
    return lifted


async def lifted_text(raw: bytes, lifted: Lifted) -> bytes:
    """Return a text whose long ones are added to ``lifted``, by a thread if it is long."""
    return lifted.lift(raw) if len(raw) <= _UNPACED_BYTES else await _aside(lifted.lift, raw)


async def understood(
    lifted: Lifted, function: Callable[..., _T], *arguments: Any, more: int = 0
) -> _T:
    """Call a function that reads a body, in a thread if that may take more than a moment.

    Args:
        more: bytes that it reads besides.
    """
    if len(lifted.raw) > _UNPACED_BYTES:
        await _aside(lambda: lifted.may_hold_media)
    if lifted.may_hold_media:
        return await _aside(function, *arguments, executor=_MEDIA)
    if len(lifted.raw) + more <= _SMALL_BYTES:
        return function(*arguments)
    return await _aside(function, *arguments)


async def aside(function: Callable[[bytes], _T], raw: bytes) -> _T:
    """Call a function that reads a body, in a thread if it is long."""
    return function(raw) if len(raw) <= _UNPACED_BYTES else await _aside(function, raw)


async def _aside(
    function: Callable[..., _T], *arguments: Any, executor: ThreadPoolExecutor = _READER
) -> _T:
    return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)


def whole_characters(raw: bytes) -> bytes:
    """Put U+FFFD in the place of each half of a surrogate pair in a JSON text.

    Clients cut texts within a pair, as JavaScript does by length. Python's JSON takes a half, and
    no tokenizer does: vLLM 0.32 would refuse the request, and each later one of the history.
    Recognition counts both as the same.
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


async def read_body(
    headers: Mapping[str, str], receive: Receive, limit: int, *, short: bool = False
) -> bytes:
    """Read a body, of at most ``limit`` bytes as it is sent and when it is decompressed.

    Raises:
        ApiError: 413, it is longer; 408, it is not whole in time; 415, its coding is not known.
        ClientDisconnect: the client left while it sent.
    """
    timeout_s = _SHORT_TIMEOUT_S if short else _TIMEOUT_S
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _body(headers, receive, limit)
            coding = headers.get("content-encoding", "").strip().lower()
            if not raw or coding in ("", "identity"):
                return raw
            body = await _aside(_decompressed, raw, coding, limit)
            await asyncio.sleep(max(0, len(body) - _UNPACED_BYTES) / _PACE_BYTES_S)
            return body
    except TimeoutError:
        raise ApiError(408, f"the request was not whole after {timeout_s:g} s", "timeout") from None


async def _body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_long(limit)
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > limit:
            raise too_long(limit)
        if not message.get("more_body"):
            return b"".join(parts) if length <= _UNPACED_BYTES else await _aside(b"".join, parts)
        if length > _UNPACED_BYTES:
            await asyncio.sleep(len(parts[-1]) / _PACE_BYTES_S)


def _decompressed(raw: bytes, coding: str, limit: int) -> bytes:
    if coding not in CODINGS:
        raise ApiError(
            415,
            f"Content-Encoding {coding[:100]!r} is not served; send {', '.join(CODINGS)}, or none",
            UNKNOWN_CODING,
        )
    # Some clients leave out zlib's header, whose first byte ends in an 8.
    bare = coding == "deflate" and raw[0] & 15 != 8
    decoder = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
    parts: list[bytes] = []
    length = read = 0
    with contextlib.suppress(zlib.error):
        while read < len(raw) and not decoder.eof:
            rest = raw[read : read + _UNPACED_BYTES]
            read += len(rest)
            while rest:
                # zlib holds the GIL while it joins the output of one call.
                parts.append(decoder.decompress(rest, _UNPACED_BYTES))
                rest = decoder.unconsumed_tail
                length += len(parts[-1])
                if length > limit:
                    raise too_long(limit)
    if not decoder.eof or decoder.unused_data or read < len(raw):
        raise ApiError(400, f"the body is not {coding}, or not one whole stream of it")
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Wait until the client of a request that was read has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_short(request: Request, most_bytes: int, empty: bytes = b"") -> Any:
    """Return the JSON of a request that is no turn; ``empty`` is that of one without a body."""
    raw = await read_body(request.headers, request.receive, most_bytes, short=True)
    return _parsed(whole_characters(raw) or empty)


def read_json(raw: bytes, path: str) -> tuple[bytes, dict[str, Any]]:
    """Parse a body, unless it holds too much to be parsed.

    Returns:
        Its JSON in whole characters, and the object.
    """
    raw = whole_characters(raw)
    if json.detect_encoding(raw) not in ("utf-8", "utf-8-sig"):
        raise ApiError(400, "the body must be JSON in UTF-8")
    budget.check_raw(raw, path not in (COMPLETIONS, DETOKENIZE))
    body = _parsed(raw)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    if not isinstance(body.get("model"), str | None):
        raise ApiError(400, "model must be a string", param="model")
    return raw, body


def read_lifted(lifted: Lifted, path: str, settings: Settings) -> dict[str, Any]:
    """Parse a body as `read_json` does, with the data of its media out of the parser's way.

    What was set aside and is no data of media is put back.

    Raises ApiError (413) if it is too long without them.
    """
    longest = settings.max_body_bytes
    if path == TOKENIZE:
        longest = min(longest, budget.MOST_TOKENIZE_BYTES)
    if len(lifted.raw) > longest:
        raise too_long(longest)
    lifted.raw, body = read_json(lifted.raw, path)
    if not lifted.spans:
        return body
    served = set() if path == COMPLETIONS else media.marks(body, path)
    if stray := lifted.spans.keys() - served:
        # Other texts have to be read, and counted.
        lifted.drop(stray)
        if len(lifted.raw) > longest:
            raise too_long(longest)
        lifted.raw, body = read_json(lifted.raw, path)
    return body


def most_bytes(settings: Settings) -> int:
    """Return how long a body may be with its media, which are in base64."""
    return settings.max_body_bytes + settings.media.bytes * 4 // 3


def too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", "body_too_long")


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError(400, "the body must be JSON in UTF-8") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None


def _refuse_constant(name: str) -> None:
    raise ApiError(400, f"the body is not valid JSON, which has no {name}")


def changed_body(raw: bytes, body: dict[str, Any], own: dict[str, Any]) -> bytes:
    """Return the JSON of ``own``, with the text that ``raw`` has of what it shares with ``body``.

    To write the strings of 8 MiB anew takes 170 ms, and Python does it in one go.
    """
    if own == body:
        return raw
    kept = all(own.get(name, _SPACE) is value for name, value in body.items())
    if kept and body and raw.startswith(b"{"):
        added = {name: value for name, value in own.items() if name not in body}
        return json.dumps(added).encode()[:-1] + b", " + raw[1:]
    sources = _sources(raw)
    members = (
        f"{json.dumps(name)}:"
        + (sources[name] if name in body and value is body[name] else json.dumps(value))
        for name, value in own.items()
    )
    return ("{" + ",".join(members) + "}").encode("utf-8", "surrogatepass")


def _sources(raw: bytes) -> dict[str, str]:
    """Return the text of each member of a JSON object."""
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    decode = json.JSONDecoder().raw_decode
    found = {}
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decode(text, at)
        at = _after_space(text, _after_space(text, at) + 1)
        _, end = decode(text, at)
        found[name] = text[at:end]
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
