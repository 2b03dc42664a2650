"""Bodies whose strings have half a surrogate pair, and those that are compressed."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.errors import ApiError
from deployments.router.errors import error_response
from deployments.router.reading import read_body, whole_characters

PIECES = st.sampled_from(
    ["a", "\\", "\\u", '"', "\n", "u", "ud83d", "é", "한", "😀", "\ufffd",
     "\ud83d", "\udbff", "\ude00", "\udc00"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)
BODIES = st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


def expected(value: Any) -> Any:
    """The same without halves: pairs that JSON has written one half after the other are whole."""
    if isinstance(value, str):
        pairs = value.encode("utf-16-le", "surrogatepass")
        return pairs.decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [expected(one) for one in value]
    return {expected(name): expected(one) for name, one in value.items()}


@given(BODIES, st.booleans())
def test_no_half_is_left_and_all_else_stays(body: Any, escaped: bool) -> None:
    text = json.dumps(body, ensure_ascii=escaped)
    raw = text.encode("utf-8", "surrogatepass")
    assert json.loads(whole_characters(raw)) == expected(json.loads(text))


@pytest.mark.parametrize("raw", [b"", b"\xed\xa0", b"{\xff\xed\xa0\xbd", b'{"a": \\ud83d', b"\\"])
def test_what_is_no_json_stays_none(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        json.loads(whole_characters(raw))


# --- Compressed bodies ----------------------------------------------------------------------------

BODY = json.dumps({"messages": ["größer"] * 100}).encode()
LIMIT = len(BODY)
GZIP = gzip.compress(BODY, mtime=0)


def body_of(raw: bytes, coding: str) -> bytes:
    """Return a body that comes in two parts, as the router reads it."""
    half = {"type": "http.request", "body": raw[:99], "more_body": True}
    messages = [half, {"type": "http.request", "body": raw[99:]}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return asyncio.run(read_body({"content-encoding": coding}, receive, LIMIT))


@pytest.mark.parametrize(
    ("coding", "raw"),
    [
        ("gzip", GZIP),
        (" GZip", GZIP),
        ("deflate", zlib.compress(BODY)),
        # Without zlib's header, as some clients have it.
        ("deflate", zlib.compress(BODY, wbits=-15)),
        ("identity", BODY),
        ("", BODY),
    ],
)
def test_a_compressed_body_is_read(coding: str, raw: bytes) -> None:
    assert body_of(raw, coding) == BODY
    assert body_of(b"", coding) == b""


@pytest.mark.parametrize(
    ("coding", "raw", "status", "said"),
    [
        ("gzip", gzip.compress(BODY + b" ", mtime=0), 413, f"longer than {LIMIT} bytes"),
        # It is not read to its end, where the checksum is wrong.
        (
            "deflate",
            zlib.compress(b" " * 10**6)[:-1] + b"x",
            413,
            f"longer than {LIMIT} bytes",
        ),
        ("gzip", GZIP[:-1], 400, "not one whole"),
        ("gzip", GZIP + GZIP, 400, "not one whole"),
        ("gzip", GZIP[:-8] + b"\0" * 8, 400, "is not gzip"),
        ("deflate", BODY, 400, "is not deflate"),
        ("zstd", BODY, 415, "'zstd' is not served; send gzip, deflate, or none"),
    ],
)
def test_a_compressed_body_is_refused(coding: str, raw: bytes, status: int, said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        body_of(raw, coding)
    assert error.value.status == status
    headers = error_response(error.value, "/v1/responses").headers
    assert headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
