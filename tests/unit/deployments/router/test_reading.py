"""Bodies whose strings have half a surrogate pair."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.router.reading import whole_characters

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


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "😀",
        r"\\ud83d is a backslash and letters",
        r"\\\\ud83d too",
        r"a pair: \ud83d\ude00",
        r"several: \uD83D\uDE00\ud83d\ude01",
        r"\u00e9\n\"\/",
    ],
)
def test_what_is_whole_stays_as_it_is_written(text: str) -> None:
    raw = f'{{"a": "{text}"}}'.encode()
    assert whole_characters(raw) is raw or whole_characters(raw) == raw
    assert json.loads(whole_characters(raw)) == json.loads(raw)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\uDE00", "\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\\\ud83d.", "\\\ufffd."),
        (r"cut \ud83d", "cut \ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d\u00e9", "\ufffdé"),
    ],
)
def test_a_half_becomes_one_replacement_character(text: str, whole: str) -> None:
    assert json.loads(whole_characters(f'["{text}"]'.encode())) == [whole]


@pytest.mark.parametrize("raw", [b"", b"\xed\xa0", b"{\xff\xed\xa0\xbd", b'{"a": \\ud83d', b"\\"])
def test_what_is_no_json_stays_none(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        json.loads(whole_characters(raw))
