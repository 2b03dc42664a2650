"""Cuts a text so that its pieces have the same tokens as the whole."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# A piece has at least this many characters. Looking up shorter ones (a turn's end, the next one's
# role) costs as much as it saves.
LEAST_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that a tokenizer finds in the raw text, before it does anything else.

    Attributes:
        plain: whether it neither depends on what stands around it nor takes any of that along.
    """

    content: str
    plain: bool = True


def special_tokens(added: Iterable[Any]) -> list[SpecialToken]:
    """Return those of some ``tokenizers.AddedToken`` that are looked for in raw text."""
    return [SpecialToken(one.content, _is_plain(one)) for one in added if not one.normalized]


def _is_plain(added: Any) -> bool:
    takes_along = added.lstrip or added.rstrip or added.single_word
    # A token before it may take whitespace along, or require that no letter follows. Tokenizers
    # differ in what is either; to none is punctuation or a symbol.
    first = unicodedata.category(added.content[:1] or " ")
    return not takes_along and first[0] in "PS" and first != "Pc"


class Pieces:
    """Cuts texts before special tokens.

    A Hugging Face tokenizer finds its added tokens in the raw text from left to right, the longest
    first, and tokenizes what lies between them separately. So a special token and what follows it
    become the same tokens whatever came before. Only plain tokens are cut at; the others are looked
    for too, since one of them may contain a plain one. When a text grows, all pieces but the last
    stay.
    """

    def __init__(self, tokens: Iterable[SpecialToken], least: int = LEAST_CHARACTERS) -> None:
        found = {token.content: token.plain for token in tokens if token.content}
        self._plain = frozenset(content for content, plain in found.items() if plain)
        self._found = re.compile(_any_of(found)) if self._plain else None
        self._least = least

    @property
    def cuts(self) -> bool:
        return bool(self._plain)

    def of(self, text: str) -> Iterator[str]:
        """Yield a text's pieces in order; none is empty."""
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
    """Return a pattern for the longest of some texts that begins at a place.

    It branches letter by letter: hundreds of reserved tokens begin alike, with "<".
    """
    tree: dict[str, Any] = {}
    for content in contents:
        node = tree
        for letter in content:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(tree: dict[str, Any]) -> str:
    # Tokens may be long, so only branches recurse.
    text = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, tree),) = tree.items()
        text += re.escape(letter)
    branches = [re.escape(letter) + _pattern(after) for letter, after in tree.items() if letter]
    if not branches:
        return text
    # A longer token is preferred.
    return f"{text}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
