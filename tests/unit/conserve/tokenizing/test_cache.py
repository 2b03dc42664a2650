"""Each piece of text is tokenized once."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.tokenizing import Pieces, SpecialToken, TokenCache

PIECES = Pieces([SpecialToken("<")], least=1)


class Letters:
    """Tokenizes letter by letter, and notes what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.given += texts
        return [[ord(letter) for letter in text] for text in texts]


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def cache(most_bytes: int = 10**6) -> tuple[TokenCache, Letters]:
    letters = Letters()
    return TokenCache(PIECES, letters, most_bytes), letters


def test_only_what_is_new_is_tokenized() -> None:
    kept, letters = cache()
    assert kept.tokens("<system<why?<") == ids("<system<why?<")
    letters.given.clear()
    assert kept.tokens("<system<why?<because<and<") == ids("<system<why?<because<and<")
    assert letters.given == ["<because", "<and", "<"]
    assert (kept.found_tokens, kept.encoded_tokens) == (12, 13 + 13)


@pytest.mark.parametrize(
    ("before", "text", "tokenized"),
    [
        # What it begins with is found, and what is changed is not.
        ("<system<one<", "<system<two<one<", ["<two", "<"]),
        # The last piece is not kept.
        ("<one<two", "<one<two", ["<two"]),
        ("", "", []),
    ],
)
def test_pieces_that_are_known_are_found(before: str, text: str, tokenized: list[str]) -> None:
    kept, letters = cache()
    kept.tokens(before)
    # What is not to be kept is found all the same.
    for keeps in (False, True):
        letters.given.clear()
        assert kept.tokens(text, keeps=keeps) == ids(text)
        assert letters.given == tokenized


def test_a_piece_that_is_there_twice_is_kept_once() -> None:
    kept, once = cache()[0], cache()[0]
    once.tokens("<one<")
    kept.tokens("<one<one<")
    assert kept.held_bytes == once.held_bytes


def test_nobody_finds_what_another_scope_has_sent_and_scopes_are_counted() -> None:
    kept, letters = cache()
    for scope in ("one", "other", "one"):
        assert kept.tokens("<secret<", scope) == ids("<secret<")
    assert letters.given == ["<secret", "<", "<secret", "<", "<"]
    kept.tokens("<one<", "s" * 5000)
    assert kept.held_bytes > 5000


def test_nothing_is_kept_of_what_is_refused() -> None:
    kept, letters = cache()
    assert kept.tokens("<one<", below_tokens=5) == ids("<one<")
    assert kept.held_bytes == 0
    kept.tokens("<one<", below_tokens=6)
    letters.given.clear()
    kept.tokens("<one<", below_tokens=5)
    assert letters.given == ["<"]


def test_the_oldest_go_first() -> None:
    kept, letters = cache(1000)
    for text in ("<a" * 1, "<b", "<c"):
        kept.tokens(text + "<")
    assert kept.held_bytes <= 1000
    letters.given.clear()
    kept.tokens("<c<")
    assert letters.given == ["<"]
    kept.tokens("<a<")
    assert "<a" in letters.given


def test_what_is_used_stays() -> None:
    kept, letters = cache(1000)
    for text in ("<a", "<b", "<a", "<c", "<a"):
        kept.tokens(text + "<")
    assert letters.given.count("<a") == 1


def test_a_piece_larger_than_all_of_it_is_tokenized_each_time() -> None:
    kept, _ = cache(1000)
    text = "<" + "a" * 2000 + "<"
    assert kept.tokens(text) == kept.tokens(text) == ids(text)
    assert kept.held_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("xy"), st.text("ab<", max_size=40)), max_size=30))
def test_it_is_always_what_the_tokenizer_says(prompts: list[tuple[str, str]]) -> None:
    kept, _ = cache(2500)
    for scope, text in prompts:
        assert kept.tokens(text, scope) == ids(text)
        assert 0 <= kept.held_bytes <= 2500


def test_threads_may_share_it() -> None:
    kept, _ = cache(5000)
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(300):
            text = f"<system<{(number + turn) % 7}<{turn % 11}<end"
            if kept.tokens(text) != ids(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 <= kept.held_bytes <= 5000
