"""A text's pieces become the tokens that the text becomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from conserve.tokenizing import Pieces, SpecialToken, special_tokens
from tests.unit.conserve.tokenizing import tokenizers as kinds

MIXED = [
    *kinds.CHAT,
    # One begins as another does, and goes on; one lies within another.
    kinds.special("<|im_start|>user"),
    kinds.special("<|im"),
    kinds.special("x<|im_end|>y"),
    # These take along what is beside them, or look at it.
    kinds.special("<mask>", lstrip=True),
    kinds.special("<|assistant|>", rstrip=True),
    kinds.special("word", single_word=True),
    kinds.special(" \n"),
    kinds.special("\u0301c"),
    kinds.special("_b"),
    # These are found after text is normalized.
    AddedToken("<tool_call>", normalized=True),
    AddedToken("é", normalized=True),
]
ALL = [
    pytest.param(make(added), id=f"{make.__name__} {name}")
    for make in (kinds.byte_level, kinds.sentence_piece, kinds.prepending, kinds.word_piece)
    for name, added in (("chat", kinds.CHAT), ("mixed", MIXED))
]
_BITS = [
    *(token.content for token in MIXED),
    *("<", "|", "<|", "|>", "im", "x", "y", " ", "  ", "\n", "\t", "\u3000", "a", "word", "words"),
    *("é", "e\u0301", "\u0301", "ﬁ", "日本", "1234", "'s", "<unk>", "▁", "\u200b", "\x00", "😀"),
]
TEXTS = st.lists(st.sampled_from(_BITS) | st.text(max_size=5), max_size=30).map("".join)


def cut(tokenizer: Tokenizer, least: int = 1) -> Pieces:
    """How its texts are cut."""
    return Pieces(special_tokens(tokenizer.get_added_tokens_decoder().values()), least)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def require_the_same(tokenizer: Tokenizer, text: str) -> None:
    pieces = [*cut(tokenizer).of(text)]
    assert "".join(pieces) == text
    assert all(pieces)
    found = [id_ for piece in pieces for id_ in encode(tokenizer, piece)]
    assert found == encode(tokenizer, text)


@pytest.mark.parametrize("tokenizer", ALL)
@given(text=TEXTS)
def test_they_become_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    require_the_same(tokenizer, text)


@pytest.mark.parametrize("tokenizer", ALL)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("wordx<|im_end|>y", id="a word, if a special token's letter does not follow"),
        pytest.param("word\u0301c word_b", id="what some count as letters"),
        pytest.param("<|assistant|> \na", id="whitespace that is taken along, and a token"),
        pytest.param("a<|im_start|>user<|im_end|>", id="one that begins as another does"),
        pytest.param("a <mask> <|im_end|> <mask>", id="whitespace on both sides"),
    ],
)
def test_these_do_too(tokenizer: Tokenizer, text: str) -> None:
    require_the_same(tokenizer, text)


@given(text=TEXTS, more=TEXTS, least=st.integers(1, 20))
def test_all_but_the_last_stay_the_same_whatever_follows(text: str, more: str, least: int) -> None:
    pieces = cut(kinds.byte_level(), least)
    begun = [*pieces.of(text)][:-1]
    # A token's first letters may be at the end of what there is.
    assert [*pieces.of(text + more)][: len(begun)] == begun


PLAIN_A, PLAIN_B, B = SpecialToken("<a>"), SpecialToken("<b>"), SpecialToken("<b>", plain=False)
CHAT = [SpecialToken("<|im_start|>"), SpecialToken("<|im_end|>")]


@pytest.mark.parametrize(
    ("tokens", "least", "text", "pieces"),
    [
        (
            CHAT,
            4,
            "hello<|im_end|>\n<|im_start|>user\nwhy?",
            ["hello", "<|im_end|>\n", "<|im_start|>user\nwhy?"],
        ),
        # Short ones stay together.
        ([PLAIN_A], 10, "<a>1234567<a><a><a><a>12", ["<a>1234567", "<a><a><a><a>12"]),
        # What takes whitespace along is not cut at.
        ([PLAIN_A, B], 1, "1 <b> 2 <a> 3", ["1 <b> 2 ", "<a> 3"]),
        # The longest is found, and takes the others' letters.
        (
            [PLAIN_A, SpecialToken("<a><b>", plain=False), PLAIN_B],
            1,
            "1<a><b>2<b>",
            ["1<a><b>2", "<b>"],
        ),
        ([SpecialToken(""), B], 1, "1<b>2", ["1<b>2"]),
        ([SpecialToken(""), B], 1, "", []),
        # Letters that mean something in patterns are letters.
        (
            [SpecialToken("[.*]"), SpecialToken("[.*](?)|$")],
            1,
            "ab[.*](?)c[.*](?)|$d",
            ["ab", "[.*](?)c", "[.*](?)|$d"],
        ),
    ],
)
def test_a_text_is_cut_before_plain_special_tokens(
    tokens: list[SpecialToken], least: int, text: str, pieces: list[str]
) -> None:
    cut_at = Pieces(tokens, least)
    assert cut_at.cuts == any(token.plain and token.content for token in tokens)
    assert [*cut_at.of(text)] == pieces
