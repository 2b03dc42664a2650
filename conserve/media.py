"""Images, audio and video in requests: where they stand, and the names that they get.

Each is named by its content, so that its name alone tells two apart: a keyed hash of its bytes and
of all that changes what a model is shown of them. Engines get the name within the URL, as a
parameter of ``data:`` (RFC 2397), whichever API the request came by. Histories are recognised by
names, too.
"""

import binascii
import hashlib
import io
import json
import re
import secrets
import string
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from conserve import apis
from conserve.errors import ApiError, unfit

Json = dict[str, Any]

PARAMETER = "conserve"
# The members of a part that hold a URL.
MEMBERS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
# A part that has a ``uuid`` alone has the member that its type says.
_MEMBER_OF = {"input_image": "image_url"} | {name: name for name in MEMBERS}
# The members of a body, beside its messages, by which vLLM makes something else of its media; and
# the template that a chat may bring, without which there may be none.
_CHANGE_MEDIA = ("model", "media_io_kwargs", "mm_processor_kwargs", "chat_template")
_MARK = f";{PARAMETER}="
_DATA = "data:"
# Shorter ones cost little to parse.
_LEAST_LIFTED_BYTES = 16 * 1024
_BASE64 = (string.ascii_letters + string.digits + "+/=").encode()
_COLON = re.compile(rb'[ \t\n\r]{0,64}:[ \t\n\r]{0,64}"')
# A body with more places where base64 may begin is parsed as it is.
_MOST_STARTS = 4096
_MARKS = re.compile(rb"conserve-[0-9a-f]{16}-\d+\.")
# Read, copied or decoded at a time, while other threads wait; base64 of whole bytes.
_PIECE_BYTES = 512 * 1024
# Each body with media has one of these members or types of parts, or an escaped letter in it.
_HINT = re.compile(rb'"(?:(?:image|audio|video)_url|(?:input_)?image|input_audio|uuid)"')
_ESCAPED = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
_LONGEST_HINT = 32
_LONGEST_TYPE = 64
# What Pillow may try: its other formats are rare, and have had more faults.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_KINDS = "a PNG, JPEG, WebP, GIF or BMP"


class Place(NamedTuple):
    """A part of a request that holds media.

    Attributes:
        where: its path in the body, as in ``messages[3].content[1]``.
        kind: ``image``, ``audio`` or ``video``.
        url: as it was sent; None: only its ``uuid`` was.
        uuid: its client's name for it, if it has one.
        changes: its kind, and what else changes what is made of it, as a text.
        part: the part itself, as it was sent.
    """

    where: str
    kind: str
    url: Any
    uuid: Any = None
    changes: str = ""
    part: Any = None


class Medium(NamedTuple):
    """Media as engines get them.

    Attributes:
        name: see `name_of`.
        media_type: as in ``image/png``.
        base64: the bytes, or what `Lifted` has put in their place.
    """

    name: str
    media_type: str
    base64: str

    @property
    def url(self) -> str:
        return f"{_DATA}{self.media_type}{_MARK}{self.name};base64,{self.base64}"


def name_of(url: str) -> str | None:
    """Return the name that a URL of `Medium` has; None: it is another one."""
    if not url.startswith(_DATA):
        return None
    head, _, _ = url[:256].partition(",")
    _, mark, after = head.partition(_MARK)
    return after.partition(";")[0] if mark else None


def make_name(salt: str | None, data: bytes, changes: str) -> str:
    """Return the name of media: a hash of the bytes and of what changes what is made of them.

    Args:
        salt: a tenant's secret, so that no tenant can tell what another one has sent; None:
            there are no tenants.
        changes: see `Place`.
    """
    hasher = hashlib.blake2b(digest_size=20, key=hashlib.sha256((salt or "").encode()).digest())
    said = changes.encode("utf-8", "surrogatepass")
    hasher.update(b"%d:" % len(said) + said)
    hasher.update(data)
    return hasher.hexdigest()


# --- Long texts, out of the way of the parser -----------------------------------------------------


class Lifted:
    """A body without its long runs of base64, for which short marks stand.

    To parse, hash and write 40 MB would hold up all streams of the process. It takes time in
    proportion to the body, whatever that holds, and holds up other threads only for moments.

    Attributes:
        raw: the body with marks.
        spans: what they stand for.
    """

    def __init__(self, raw: bytes) -> None:
        self._prefix = f"conserve-{secrets.token_hex(8)}-"
        self._count = 0
        self._looked_at: bytes | None = None
        self._may_hold_media = False
        self.spans: dict[str, bytes] = {}
        self.raw = self.lift(raw)

    @property
    def may_hold_media(self) -> bool:
        """Whether the body, a turn's, may have parts with media; False: it has none."""
        if self._looked_at is not self.raw:
            self._looked_at = self.raw
            self._may_hold_media = bool(self.spans) or _is_in(self.raw, _HINT, _ESCAPED)
        return self._may_hold_media

    @property
    def size(self) -> int:
        """The length of the body with what the marks in it stand for."""
        found = (mark[0].decode() for mark in _MARKS.finditer(self.raw))
        more = sum(len(self.spans[mark]) - len(mark) for mark in found if mark in self.spans)
        return len(self.raw) + more

    def lift(self, raw: bytes) -> bytes:
        """Return a text with marks for what follows ``;base64,`` or is a member called ``data``."""
        parts: list[bytes] = []
        at = end = 0
        for start in sorted((*_after(raw, b";base64,"), *_members(raw))):
            if start > end:
                end = raw.find(b'"', start)
                if end < 0:
                    break
            if start < at or end - start < _LEAST_LIFTED_BYTES:
                continue
            pieces = _base64(raw, start, end)
            if pieces:
                # Other threads run while they are joined.
                parts += (raw[at:start], self.add(b"".join(pieces)).encode())
                at = end
        return b"".join((*parts, raw[at:])) if parts else raw

    def add(self, span: bytes) -> str:
        mark = f"{self._prefix}{self._count}."
        self._count += 1
        self.spans[mark] = span
        return mark

    def drop(self, marks: Collection[str]) -> None:
        """Put the spans of some marks back for good."""
        self.raw = put_back(self.raw, {mark: self.spans.pop(mark) for mark in marks})

    def put_back(self, raw: bytes) -> bytes:
        return put_back(raw, self.spans)


def _is_in(raw: bytes, *patterns: re.Pattern[bytes]) -> bool:
    """Return whether a pattern, for short texts, is found; other threads run between its pieces."""
    return any(
        pattern.search(raw, at, at + _PIECE_BYTES + _LONGEST_HINT)
        for at in range(0, len(raw), _PIECE_BYTES)
        for pattern in patterns
    )


def put_back(raw: bytes, spans: Mapping[str, bytes]) -> bytes:
    parts: list[bytes] = []
    at = 0
    for found in _MARKS.finditer(raw) if spans else ():
        span = spans.get(found[0].decode())
        if span is not None:
            parts += (raw[at : found.start()], span)
            at = found.end()
    return b"".join((*parts, raw[at:])) if parts else raw


def _base64(raw: bytes, start: int, end: int) -> list[bytes]:
    """Return a part of a body in pieces if it is all base64, otherwise nothing."""
    pieces = []
    # The first ones are short, so that it takes time in proportion to what is base64.
    size = _LEAST_LIFTED_BYTES
    while start < end:
        piece = raw[start : min(start + size, end)]
        if piece.translate(None, _BASE64):
            return []
        pieces.append(piece)
        start, size = start + size, min(2 * size, _PIECE_BYTES)
    return pieces


def _after(raw: bytes, text: bytes) -> Iterator[int]:
    """Yield where a text ends in a body, a few thousand times at most."""
    at = count = 0
    while at < len(raw) and count < _MOST_STARTS:
        end = at + _PIECE_BYTES
        found = raw.find(text, at, end + len(text) - 1)
        at = end if found < 0 else found + len(text)
        if found >= 0:
            count += 1
            yield at


def _members(raw: bytes) -> Iterator[int]:
    """Yield where the texts of members called ``data`` begin."""
    for at in _after(raw, b'"data"'):
        found = _COLON.match(raw, at)
        if found is not None:
            yield found.end()


# --- Where they stand -----------------------------------------------------------------------------

Put = Callable[[Place], str | None]


def places(body: Json, path: str) -> list[Place]:
    """Return the parts of a turn's body that hold media, in their order."""
    found: list[Place] = []
    with_urls(body, path, found.append)
    return found


def with_urls(body: Json, path: str, put: Put) -> Json:
    """Return a body with other URLs in its parts that hold media, and without names of theirs.

    Args:
        put: called with each place; returns its new URL, or None if the part stays as it is.

    Returns:
        The same object, if no part changes.
    """
    name = "input" if path == apis.RESPONSES else "messages"
    said = json.dumps(body.get("media_io_kwargs"), sort_keys=True).encode()
    changes = hashlib.sha256(said).hexdigest()
    walk = _Walk(put, changes, anthropic=apis.is_anthropic(path))
    given = body.get(name)
    changed = walk.each(given, name)
    return body if changed is given else {**body, name: changed}


@dataclass(slots=True)
class _Walk:
    put: Put
    changes: str
    anthropic: bool

    def each(self, given: Any, where: str, depth: int = 0) -> Any:
        if not isinstance(given, list):
            return given
        changed = [self.one(one, f"{where}[{n}]", depth) for n, one in enumerate(given)]
        return given if changed == given else changed

    def one(self, given: Any, where: str, depth: int) -> Any:
        """Return a message or item (0), its part (1), or a part of a tool's result in it (2)."""
        if not isinstance(given, dict):
            return given
        own = given
        # Of an assistant's tool results vLLM shows the JSON.
        deepest = 1 if depth == 0 and given.get("role") == "assistant" else 2
        for name in ("content", "output") if depth < deepest else ():
            inner = given.get(name)
            changed = self.each(inner, f"{where}.{name}", depth + (2 if deepest == 1 else 1))
            if changed is not inner:
                own = {**own, name: changed}
        return self._part(own, where) if depth else own

    def _part(self, given: Json, where: str) -> Json:
        if self.anthropic:
            return self._block(given, where) if given.get("type") == "image" else given
        own = {name: value for name, value in given.items() if name != "uuid"}
        uuid = given.get("uuid")
        for member, kind in MEMBERS.items():
            value = given.get(member)
            named = uuid is not None and _MEMBER_OF.get(str(given.get("type"))) == member
            if value is None and not named:
                continue
            detail = value.get("detail") if isinstance(value, dict) else given.get("detail")
            url = value.get("url") if isinstance(value, dict) else value
            new = self.put(Place(where, kind, url, uuid, self._changes(kind, detail), given))
            if new is not None and given.get("type") == "input_image":
                own[member] = new
            elif new is not None:
                own[member] = {**value, "url": new} if isinstance(value, dict) else {"url": new}
        audio = given.get("input_audio")
        form = audio.get("format") if isinstance(audio, dict) else "wav"
        if not isinstance(form, str) or not form.isalnum():
            # vLLM writes it into a URL, which may hold a name.
            raise unfit(where, "must have an input_audio.format, as in wav")
        return given if own == given else own

    def _block(self, block: Json, where: str) -> Json:
        source = block.get("source")
        if not isinstance(source, dict):
            return block
        url = source.get("url")
        if source.get("type") != "url":
            media_type, data = source.get("media_type", "image/jpeg"), source.get("data")
            if not isinstance(data, str) or not isinstance(media_type, str):
                raise unfit(where, "must have a source with a media_type and data in base64")
            url = f"{_DATA}{media_type};base64,{data}"
        new = self.put(Place(where, "image", url, None, self._changes("image", None), block))
        return block if new is None else {**block, "source": {"type": "url", "url": new}}

    def _changes(self, kind: str, detail: Any) -> str:
        return f"{kind} {None if detail == 'auto' else detail} {self.changes}"


def alone(body: Json, path: str, part: Json) -> Json:
    """Return a request by the same API of one part with media, and what changes what is made of it.

    An engine makes the same of it as in the turn.
    """
    kept = {name: body[name] for name in _CHANGE_MEDIA if name in body}
    said = [{"role": "user", "content": [part]}]
    if path == apis.RESPONSES:
        return {**kept, "input": said, "store": False}
    return {**kept, "messages": said, "max_tokens": 1}


def marks(body: Json, path: str) -> set[str]:
    """Return what stands for data in the ``data:`` URLs of a body: marks of `Lifted`, or base64.

    Raises ApiError (400) for a body that is nested too deep to be looked at.
    """
    try:
        urls = [place.url for place in places(body, path)]
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    return {url.partition(",")[2] for url in urls if isinstance(url, str) and url.startswith(_DATA)}


def lifted_media(raw: bytes, path: str) -> Lifted:
    """Set the data of a body's media aside, and nothing else: other texts are read, and counted."""
    lifted = Lifted(raw)
    if not lifted.spans:
        return lifted
    served: set[str] = set()
    try:
        body = json.loads(lifted.raw)
        if isinstance(body, dict) and path != apis.COMPLETIONS:
            served = marks(body, path)
    except (ValueError, RecursionError, ApiError):
        pass  # The engine refuses it.
    lifted.drop(lifted.spans.keys() - served)
    return lifted


# --- What they are --------------------------------------------------------------------------------


def data_of(url: str, lifted: Mapping[str, bytes], where: str) -> tuple[str, bytes, str]:
    """Return a ``data:`` URL's media type, its bytes, and its base64 as it was sent.

    Raises ApiError (400) if it is not in base64.
    """
    head, comma, text = url.removeprefix(_DATA).partition(",")
    media_type, *parameters = head.split(";")
    is_base64 = bool(comma and parameters and parameters[-1].strip().lower() == "base64")
    if not is_base64 or len(media_type) > _LONGEST_TYPE:
        raise unfit(where, "must be a data: URL in base64, as in data:image/png;base64,...")
    span = lifted.get(text)
    try:
        encoded = span if span is not None else text.encode("ascii")
        return media_type.strip().lower(), _decoded(encoded), text
    except ValueError:
        raise unfit(where, "is not valid base64") from None


def _decoded(encoded: bytes) -> bytes:
    padding = encoded.find(b"=")
    if 0 <= padding < len(encoded) - 2:
        raise ValueError
    pieces = range(0, len(encoded), _PIECE_BYTES)
    return b"".join(
        [binascii.a2b_base64(encoded[at : at + _PIECE_BYTES], strict_mode=True) for at in pieces]
    )


def check_image(data: bytes, most_pixels: int, where: str) -> tuple[str, int]:
    """Return an image's media type and pixels, if it can be shown to a model: it is decoded.

    Only the first picture of an animation counts, as for vLLM.

    Raises ApiError (400), which says what is wrong with it and nothing of this server.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Its size is judged below, before it is decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError:
        raise _too_many_pixels(where, None, most_pixels) from None
    except _BROKEN:
        raise unfit(where, f"is no image that can be read; send {_KINDS} image") from None
    width, height = image.size
    if width * height > most_pixels:
        raise _too_many_pixels(where, f"{width} x {height}", most_pixels)
    try:
        image.load()
    except _BROKEN:
        raise unfit(where, "is an image that is damaged, or not whole") from None
    assert image.format is not None
    return str(Image.MIME[image.format]), width * height


# What Pillow raises for files that are none, or damaged.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError,
           OverflowError)  # fmt: skip


def _too_many_pixels(where: str, size: str | None, most: int) -> ApiError:
    shown = "" if size is None else f" ({size})"
    return unfit(where, f"has more than {most:,} pixels{shown}; send a smaller image")
