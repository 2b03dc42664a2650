"""Cuts a text so that its pieces become the tokens that it becomes as a whole."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# A piece ends at the first special token after so many characters. Shorter ones (a turn's end, the
# next one's role) cost as much to look up as they save.
LEAST_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that a tokenizer finds in the raw text, before anything else is done with it.

    Attributes:
        content: the text that becomes it.
        plain: whether nothing around it decides if it is found, or is taken along, and it decides
            nothing for what stands before it: not about whitespace (``lstrip``, ``rstrip``), nor
            about letters (``single_word``).
    """

    content: str
    plain: bool = True


def special_tokens(added: Iterable[Any]) -> list[SpecialToken]:
    """Return those of a tokenizer's added tokens that it looks for in raw text.

    Args:
        added: as ``tokenizers.AddedToken`` describes them.
    """
    return [SpecialToken(one.content, _is_plain(one)) for one in added if not one.normalized]


def _is_plain(added: Any) -> bool:
    takes_along = added.lstrip or added.rstrip or added.single_word
    # One before it may take whitespace along, or be a word that ends where no letter follows. What
    # counts as either is the tokenizer's to say; punctuation and symbols do nowhere.
    first = unicodedata.category(added.content[:1] or " ")
    return not takes_along and first[0] in "PS" and first != "Pc"


class Pieces:
    """Cuts texts before special tokens.

    A Hugging Face tokenizer first finds its added tokens in the raw text, from left to right, the
    longest that begins at a place; then it normalizes and splits what lies between two of them by
    itself. So what follows a special token, with that token, becomes the same tokens whatever came
    before. Only those that are plain are cut at; the others are looked for all the same, since one
    of them may take a plain one's characters.

    A cut depends on the text before it alone: whatever a text is continued with, its pieces stay
    the same, but for the last one.

    Args:
        tokens: all that the tokenizer looks for in raw text.

    Example:
        >>> pieces = Pieces([SpecialToken("<|im_start|>"), SpecialToken("<|im_end|>")], least=4)
        >>> list(pieces.of("<|im_start|>user: why?<|im_end|>"))
        ['<|im_start|>user: why?', '<|im_end|>']
    """

    def __init__(self, tokens: Iterable[SpecialToken], least: int = LEAST_CHARACTERS) -> None:
        # An empty token is found nowhere.
        found = {token.content: token.plain for token in tokens if token.content}
        self._plain = frozenset(content for content, plain in found.items() if plain)
        self._found = re.compile(_any_of(found)) if self._plain else None
        self._least = least

    @property
    def cuts(self) -> bool:
        """Whether there is any token to cut at."""
        return bool(self._plain)

    def of(self, text: str) -> Iterator[str]:
        """A text's pieces, in order; together they are the text. None is empty."""
        begin = 0
        if self._found is not None:
            for match in self._found.finditer(text):
                at = match.start()
                if at - begin >= self._least and match[0] in self._plain:
                    yield text[begin:at]
                    begin = at
        if begin < len(text):
            yield text[begin:]


def _any_of(contents: Iterable[str]) -> str:
    """A pattern for the longest of some texts that begins at a place.

    It branches letter by letter: of hundreds of reserved tokens that begin alike, each "<" of a
    page of HTML would be held against every one.
    """
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for letter in content:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(tree: dict[str, Any]) -> str:
    # Letters in a row, without a branch, are no recursion: tokens may be long.
    text = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, tree),) = tree.items()
        text += re.escape(letter)
    branches = [re.escape(letter) + _pattern(after) for letter, after in tree.items() if letter]
    if not branches:
        return text
    # What goes on is preferred to what ends here.
    return f"{text}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
