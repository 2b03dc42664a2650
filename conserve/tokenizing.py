"""Tokenizes prompts, each piece of text once, and keeps clients' text apart from control tokens."""

import json
import re
import secrets
import sys
import threading
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

# A piece has at least this many characters. Looking up shorter ones (a turn's end, the next one's
# role) costs as much as it saves.
LEAST_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token found in raw text; ``plain`` if it does not depend on what stands around it."""

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

    A Hugging Face tokenizer finds its added tokens in the raw text first, from left to right, the
    longest of several. So a special token and what follows it become the same tokens whatever came
    before. Only plain tokens are cut at. When a text grows, all pieces but the last stay.
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


# Added tokens that are ordinary text: words, white space, and HTML's tags, as Gemma has them.
_ORDINARY = re.compile(
    r"[\w\s▁]*|(\W)\1*|</?(table|caption|thead|tbody|tfoot|t[rhd]|h[1-6]|blockquote|strong|em|[bius]"
    r"|su[bp]|code)>"
)
# <think>, <tool_call>: models write such tags into their answers, and clients send them back.
_TAG = re.compile(r"</?[\w:]+>")
# A search by Python's `re` holds up all threads, so none is of more characters.
_STEP = 2**16


class TextMarks:
    """Marks what would be control tokens in clients' text, so that it stays text in a prompt.

    A chat template joins that text with control tokens, and a tokenizer finds both. So ``mark``,
    which no text has, goes behind the first character of each control token in clients' text, and
    behind the first part of one at a text's end. The tokenizer has to find control tokens before
    it removes marks.
    """

    def __init__(self, added: Iterable[Any]) -> None:
        """Take the ``AddedToken`` objects of a tokenizer."""
        self.mark = f"~{secrets.token_hex(3)}~"
        control = [one for one in added if one.special or not _ORDINARY.fullmatch(one.content)]
        self.control = {one.content for one in control if len(one.content) > 1}
        tags = {one.content for one in control if _TAG.fullmatch(one.content) and not one.special}
        self._all = partial(self._marked, _beginnings(self.control))
        self._but_tags = partial(self._marked, _beginnings(self.control - tags))
        self._firsts = {one[0] for one in self.control}
        self._longest = max(map(len, self.control), default=0)
        punctuated = (one for one in self.control if re.match(r"[^\w\s]", one))
        self._parts = {one[:end] for one in punctuated for end in range(1, len(one))}

    def chat(self, messages: Iterable[Mapping[str, Any]], values: Any) -> tuple[list[Any], Any]:
        """Return what a template shows, messages and other values, with its texts marked.

        The content of the model's own messages keeps the tags that it writes, such as ``<think>``.
        """
        marked = []
        for message in messages:
            own = {"content": self._but_tags} if message.get("role") == "assistant" else {}
            marked.append({k: _in_texts(v, own.get(k, self._all), k) for k, v in message.items()})
        return marked, _in_texts(values, self._all)

    def removed(self, value: Any) -> Any:
        """Return a text, or what has texts, without marks."""
        return _in_texts(value, lambda text, _: text.replace(self.mark, ""))

    def _marked(self, control: list[re.Pattern[str]], text: str, name: str) -> str:
        if name == "arguments" and ("\\u" in text or "\\/" in text):
            # JSON in a string, whose escapes may be a control token's characters.
            with suppress(ValueError, RecursionError):
                marked = json.dumps(_in_texts(json.loads(text), self._all), ensure_ascii=False)
                if self.mark in marked:
                    return marked
        last = max(map(text.rfind, self._firsts))
        if last < 0:
            return text
        ends = sorted(
            match.end()
            for start in range(0, len(text), _STEP)
            for one in control
            for match in one.finditer(text, start, start + _STEP + self._longest)
            if match.start() < start + _STEP
        )
        if text[last:] in self._parts:
            ends.append(len(text))
        return self.mark.join(text[a:b] for a, b in pairwise([0, *ends, len(text)]))


def _in_texts(value: Any, change: Callable[[str, str], str], name: str = "") -> Any:
    """Return a JSON value with its texts and names changed; ``change`` gets texts' names, too."""
    if isinstance(value, str):
        return change(value, name)
    if isinstance(value, dict):
        return {_in_texts(key, change): _in_texts(one, change, key) for key, one in value.items()}
    return [_in_texts(one, change, name) for one in value] if isinstance(value, list) else value


def _beginnings(contents: Iterable[str]) -> list[re.Pattern[str]]:
    """Return a pattern for each first character of some texts, also of one within another."""
    rests: dict[str, list[str]] = {}
    for content in contents:
        rests.setdefault(content[0], []).append(content[1:])
    return [re.compile(f"{re.escape(one)}(?={_any_of(rest)})") for one, rest in rests.items()]


# Beside an entry's strings and tokens: the key, the array, the table's slots.
_ENTRY_BYTES = 300

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


class TokenCache:
    """Tokenizes prompts by their pieces, each piece once; safe to use from several threads.

    Args:
        encode: tokenizes texts, each by itself, adding nothing; called without a lock held.
        most_bytes: of host memory; the least recently used entries go first.
    """

    def __init__(self, pieces: Pieces, encode: Encode, most_bytes: int) -> None:
        self._pieces = pieces
        self._encode = encode
        self._most_bytes = most_bytes
        self.held_bytes = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.found_tokens = 0
        self.encoded_tokens = 0

    def tokens(
        self, text: str, scope: str = "", keeps: bool = True, below_tokens: int | None = None
    ) -> list[int]:
        """Return a prompt's tokens; a prompt of ``below_tokens`` or more is refused, and not kept.

        Only what was tokenized under the same ``scope`` is found, so that no tenant can tell by the
        time taken what others have sent.
        """
        pieces = [*self._pieces.of(text)]
        with self._lock:
            parts: list[Sequence[int] | None] = [self._find(scope, piece) for piece in pieces]
            self.found_tokens += sum(len(part) for part in parts if part is not None)
        missing = [at for at, part in enumerate(parts) if part is None]
        encoded = self._encode([pieces[at] for at in missing]) if missing else []
        for at, ids in zip(missing, encoded, strict=True):
            parts[at] = ids
        tokens: list[int] = []
        for part in parts:
            tokens.extend(part or ())
        keeps = keeps and (below_tokens is None or len(tokens) < below_tokens)
        with self._lock:
            self.encoded_tokens += sum(map(len, encoded))
            for at, ids in zip(missing, encoded, strict=True):
                # The last piece will be continued.
                if keeps and at < len(pieces) - 1:
                    self._keep(scope, pieces[at], ids)
        return tokens

    def _find(self, scope: str, piece: str) -> "array[int] | None":
        known = self._known.get((scope, piece))
        if known is not None:
            self._known.move_to_end((scope, piece))
        return known

    def _keep(self, scope: str, piece: str, ids: Sequence[int]) -> None:
        if (scope, piece) in self._known:
            return
        self._known[scope, piece] = array("I", ids)
        self.held_bytes += _size(scope, piece, ids)
        while self.held_bytes > self._most_bytes:
            oldest, dropped = self._known.popitem(last=False)
            self.held_bytes -= _size(*oldest, dropped)


def _size(scope: str, piece: str, ids: Sequence[int]) -> int:
    return sys.getsizeof(scope) + sys.getsizeof(piece) + 4 * len(ids) + _ENTRY_BYTES
