"""Images, audio and video in requests: where they stand, and the names that they get.

Each is named by its content, so that its name alone tells two apart: a keyed hash of its bytes and
of all that changes what a model is shown of them. Engines get the name within the URL, as a
parameter of ``data:`` (RFC 2397), whichever API the request came by. Histories are recognised by
names, too.
"""

import base64
import binascii
import hashlib
import io
import json
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conserve import apis
from conserve.errors import ApiError

Json = dict[str, Any]

PARAMETER = "conserve"
# The members of a part that hold a URL.
MEMBERS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_MARK = f";{PARAMETER}="
_DATA = "data:"
# Shorter ones cost little to parse.
_LEAST_LIFTED_BYTES = 16 * 1024
_BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
# Decoded at a time, while other threads wait; base64 of whole bytes.
_PIECE_CHARS = 512 * 1024
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
        changes: what changes what is made of it.
    """

    where: str
    kind: str
    url: Any
    uuid: Any = None
    changes: Any = None


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


def make_name(salt: str | None, data: bytes, changes: Any) -> str:
    """Return the name of media: a hash of the bytes and of what changes what is made of them.

    Args:
        salt: a tenant's secret, so that no tenant can tell what another one has sent; None:
            there are no tenants.
    """
    hasher = hashlib.blake2b(digest_size=20, key=hashlib.sha256((salt or "").encode()).digest())
    hasher.update(json.dumps(changes, sort_keys=True, default=str).encode() + b"\0")
    hasher.update(data)
    return hasher.hexdigest()


# --- Long texts, out of the way of the parser -----------------------------------------------------


@dataclass(slots=True)
class Lifted:
    """A body without its long runs of base64, for which short marks stand.

    To parse, hash and write 40 MB would hold up all streams of the process.

    Attributes:
        raw: the body with marks.
        spans: what they stand for.
    """

    raw: bytes
    spans: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: bytes, only: Sequence[bytes] | None = None) -> "Lifted":
        """Lift what follows ``;base64,`` or is a member called ``data``.

        Args:
            only: the spans to lift; None: all that are long.
        """
        secret = secrets.token_hex(8)
        spans: dict[str, bytes] = {}
        parts: list[bytes] = []
        at = 0
        for start in _starts(raw):
            if start < at:
                continue
            end = raw.find(b'"', start)
            if end - start < _LEAST_LIFTED_BYTES:
                continue
            span = raw[start:end]
            if not _is_base64(span) or (only is not None and span not in only):
                continue
            mark = f"conserve-{secret}-{len(spans)}"
            spans[mark] = span
            parts += (raw[at:start], mark.encode())
            at = end
        parts.append(raw[at:])
        return cls(b"".join(parts), spans)

    def put_back(self, raw: bytes) -> bytes:
        """Return a body with the spans in the places of their marks, each of which is used once."""
        at = 0
        parts: list[bytes] = []
        found = sorted((raw.find(mark.encode()), mark) for mark in self.spans)
        for start, mark in found:
            if start >= at:
                parts += (raw[at:start], self.spans[mark])
                at = start + len(mark)
        return b"".join((*parts, raw[at:])) if parts else raw

    def add(self, span: bytes) -> str:
        """Return a mark for one more span."""
        mark = f"conserve-{secrets.token_hex(8)}-{len(self.spans)}"
        self.spans[mark] = span
        return mark


def _starts(raw: bytes) -> Iterator[int]:
    """Yield where base64 may begin, in no order that matters."""
    found = [*_after(raw, b";base64,")]
    for at in _after(raw, b'"data"'):
        colon = _skip_space(raw, at)
        quote = _skip_space(raw, colon + 1) if raw[colon : colon + 1] == b":" else len(raw)
        if raw[quote : quote + 1] == b'"':
            found.append(quote + 1)
    yield from sorted(found)


def _after(raw: bytes, text: bytes) -> Iterator[int]:
    at = raw.find(text)
    while at >= 0:
        at += len(text)
        yield at
        at = raw.find(text, at)


def _skip_space(raw: bytes, at: int) -> int:
    while raw[at : at + 1] in (b" ", b"\t", b"\n", b"\r"):
        at += 1
    return at


def _is_base64(span: bytes) -> bool:
    return not span.translate(None, bytes(_BASE64))


# --- Where they stand -----------------------------------------------------------------------------

Put = Callable[[Place], str | None]


def places(body: Json, path: str) -> list[Place]:
    """Return the parts of a turn's body that hold media, in their order."""
    found: list[Place] = []

    def note(place: Place) -> None:
        found.append(place)

    with_urls(body, path, note)
    return found


def with_urls(body: Json, path: str, put: Put) -> Json:
    """Return a body with other URLs in its parts that hold media, and without names of theirs.

    Args:
        put: called with each place; returns its new URL, or None if the part stays as it is.

    Returns:
        The same object, if no part changes.
    """
    changes = body.get("media_io_kwargs")
    name = "input" if path == apis.RESPONSES else "messages"
    walk = _Walk(put, changes, anthropic=apis.is_anthropic(path))
    given = body.get(name)
    changed = walk.each(given, name)
    return body if changed is given else {**body, name: changed}


@dataclass(slots=True)
class _Walk:
    put: Put
    changes: Any
    anthropic: bool

    def each(self, given: Any, where: str) -> Any:
        if not isinstance(given, list):
            return given
        changed = [self.one(one, f"{where}[{n}]") for n, one in enumerate(given)]
        same = all(one is other for one, other in zip(changed, given, strict=True))
        return given if same else changed

    def one(self, given: Any, where: str) -> Any:
        """Return a message, an item or a part; parts stand in contents, and in outputs of tools."""
        if not isinstance(given, dict):
            return given
        own = given
        for name in ("content", "output"):
            inner = given.get(name)
            changed = self.each(inner, f"{where}.{name}")
            if changed is not inner:
                own = {**own, name: changed}
        if self.anthropic and given.get("type") == "image":
            return self._block(own, where)
        for member in MEMBERS:
            if member in given:
                return self._part(own, member, where)
        # What vLLM has made of other parts is kept under their names, whoever gives one.
        return {name: own[name] for name in own if name != "uuid"} if "uuid" in own else own

    def _block(self, block: Json, where: str) -> Json:
        source = block.get("source")
        if not isinstance(source, dict):
            return block
        if source.get("type") == "url":
            url = source.get("url")
        else:
            media_type, data = source.get("media_type", "image/jpeg"), source.get("data")
            if not isinstance(data, str) or not isinstance(media_type, str):
                return block
            url = f"{_DATA}{media_type};base64,{data}"
        new = self.put(Place(where, "image", url, block.get("uuid"), self._all(None)))
        return block if new is None else {**block, "source": {"type": "url", "url": new}}

    def _part(self, part: Json, member: str, where: str) -> Json:
        given = part[member]
        url = given.get("url") if isinstance(given, dict) else given
        detail = given.get("detail") if isinstance(given, dict) else part.get("detail")
        new = self.put(Place(where, MEMBERS[member], url, part.get("uuid"), self._all(detail)))
        if new is None:
            return part
        own = {name: value for name, value in part.items() if name != "uuid"}
        return {**own, member: {**given, "url": new} if isinstance(given, dict) else new}

    def _all(self, detail: Any) -> Any:
        return [None if detail == "auto" else detail, self.changes]


def marks(body: Json, path: str) -> set[str]:
    """Return what stands for data in the ``data:`` URLs of a body: marks of `Lifted`, or base64."""
    urls = [place.url for place in places(body, path)]
    return {url.partition(",")[2] for url in urls if isinstance(url, str) and url.startswith(_DATA)}


# --- What they are --------------------------------------------------------------------------------


def data_of(url: str, lifted: Mapping[str, bytes], where: str) -> tuple[str, bytes, str]:
    """Return a ``data:`` URL's media type, its bytes, and its base64 as it was sent.

    Raises ApiError (400) if it is not in base64.
    """
    head, comma, text = url.removeprefix(_DATA).partition(",")
    media_type, *parameters = head.split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise unfit(where, "must be a data: URL in base64, as in data:image/png;base64,...")
    span = lifted.get(text)
    try:
        encoded = span if span is not None else text.encode("ascii")
        return media_type.strip().lower(), _decoded(encoded), text
    except ValueError:
        raise unfit(where, "is not valid base64") from None


def _decoded(encoded: bytes) -> bytes:
    if len(encoded) <= _PIECE_CHARS:
        return binascii.a2b_base64(encoded, strict_mode=True)
    if not _is_base64(encoded):
        raise ValueError
    pieces = range(0, len(encoded), _PIECE_CHARS)
    return b"".join(
        binascii.a2b_base64(encoded[at : at + _PIECE_CHARS], strict_mode=True) for at in pieces
    )


def encoded(data: bytes) -> bytes:
    return base64.b64encode(data)


def check_image(data: bytes, most_pixels: int, where: str) -> str:
    """Return an image's media type, if it can be shown to a model: it is decoded once.

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
    return str(Image.MIME[image.format])


# What Pillow raises for files that are none, or damaged.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError,
           OverflowError)  # fmt: skip


def _too_many_pixels(where: str, size: str | None, most: int) -> ApiError:
    shown = "" if size is None else f" ({size})"
    return unfit(where, f"has more than {most:,} pixels{shown}; send a smaller image")


def unfit(where: str, what: str) -> ApiError:
    """Return the refusal of a part, which is named."""
    return ApiError(400, f"{where} {what}", param=where)
