"""Gives media in requests their names, and fetches those that are sent by URL.

Engines fetch nothing. The router fetches from `Settings.allowed_media_domains` alone, once, and
connects only to addresses that are public: the name is resolved here, and what was checked is what
is connected to.
"""

import asyncio
import base64
import ipaddress
import json
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import ResolveResult

from conserve.encoders import Encoders
from conserve.errors import ApiError, unfit
from conserve.loopback import address_of
from conserve.media import (
    Lifted,
    Medium,
    Place,
    alone,
    check_image,
    data_of,
    make_name,
    name_of,
    places,
    with_urls,
)
from conserve.models import Names
from conserve.settings import Settings

_FETCH_S = 20.0
# What is fetched, or has a client's own name, is kept for later turns of its history.
_KEPT_BYTES = 256 * 1024 * 1024
_LONGEST_UUID = 256
# What Python takes for an entry, beside its key and data.
_ENTRY_BYTES = 512
# Images that have been decoded once are not decoded again.
_MOST_CHECKED = 16_384
# One request may have the router decode this number of images of the largest size.
_MOST_LARGEST = 8
_REMOTE = ("http://", "https://")


class NotFetched(Exception):
    """Media have to be fetched first.

    Attributes:
        urls: where from, with the path of the first part that names each.
        kept: those that are here, by their URL: they may be dropped meanwhile.
    """

    def __init__(self, urls: dict[str, str], kept: dict[str, bytes]) -> None:
        super().__init__()
        self.urls = urls
        self.kept = kept


@dataclass(eq=False)
class MediaReader:
    """Names the media of requests, and keeps what has to be kept of them, for its `encoders`.

    Attributes:
        names: the application's models.
        kept: media that a tenant has sent, by ``url`` or ``uuid``, the tenant's salt, and that.
        types: media types of images that were decoded, by name.
    """

    settings: Settings
    names: Names
    encoders: Encoders = field(default_factory=Encoders)
    kept: "_Kept" = field(default_factory=lambda: _Kept(_KEPT_BYTES))
    types: "OrderedDict[str, str]" = field(default_factory=OrderedDict)

    def named(
        self,
        body: dict[str, Any],
        path: str,
        lifted: Lifted,
        salt: str | None,
        fetched: Mapping[str, bytes] | None = None,
    ) -> Any:
        """Return a turn's body with each medium as engines get it; see `conserve.media.Medium`.

        Long texts of media that were ``fetched``, by URL, are added to ``lifted``. Raises
        `ApiError`, 400 for media that cannot be served and 503 for too many new ones at a time, or
        `NotFetched` if some are sent by URL, and are not here yet.
        """
        if not lifted.may_hold_media:
            return body
        reading = _Reading(self, lifted, salt, fetched or {})
        own = with_urls(body, path, reading.put)
        if reading.missing:
            raise NotFetched(reading.missing, reading.kept)
        return own

    def to_encode(self, own: dict[str, Any], path: str, lifted: Lifted) -> dict[str, bytes]:
        """Return a body for each medium (of `named`) that encoders may have to encode, by name."""
        if not self.settings.encoders.replicas:
            return {}
        new = {name_of(place.url) or "": place.part for place in places(own, path)}
        return {
            name: lifted.put_back(json.dumps(alone(own, path, part)).encode())
            for name, part in new.items()
            if self.encoders.lacks(name)
        }

    async def fetch(self, missing: NotFetched, salt: str | None) -> dict[str, bytes]:
        """Fetch media, and keep them; returns all of the request by URL, or raises ApiError."""
        budget = FetchBudget(self.settings.media.bytes)
        domains = self.settings.allowed_media_domains
        tasks = {
            url: asyncio.ensure_future(fetched(url, where, domains, budget))
            for url, where in missing.urls.items()
        }
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        found = {url: task.result() for url, task in tasks.items()}
        for url, data in found.items():
            self.kept.put(("url", salt, url), data)
        return missing.kept | found


@dataclass(slots=True)
class _Reading:
    """Reads one request's media; `size` is in bytes, and `pixels` of images that were decoded."""

    reader: MediaReader
    lifted: Lifted
    salt: str | None
    fetched: Mapping[str, bytes]
    missing: dict[str, str] = field(default_factory=dict)
    kept: dict[str, bytes] = field(default_factory=dict)
    count: int = 0
    size: int = 0
    pixels: int = 0

    def put(self, place: Place) -> str | None:
        limits = self.reader.settings.media
        self.count += 1
        if self.count > limits.parts:
            raise unfit(
                place.where,
                f"is one part too many with media: a request may have {limits.parts}; leave out "
                "old ones",
            )
        found = self._data(place)
        if found is None:
            return None
        media_type, data, text = found
        self.size += len(data)
        if self.size > limits.bytes:
            raise unfit(
                place.where,
                f"makes this request's media longer than {limits.bytes:,} bytes; send smaller or "
                "fewer ones",
            )
        name = make_name(self.salt, data, place.changes)
        if place.kind == "image":
            media_type = self._image_type(name, data, place.where)
        if place.uuid is not None:
            self.reader.kept.put(("uuid", self.salt, _uuid(place)), data)
        return Medium(name, media_type, text).url

    def _image_type(self, name: str, data: bytes, where: str) -> str:
        types = self.reader.types
        if name in types:
            return types[name]
        most = self.reader.settings.media.pixels
        known, pixels = check_image(data, most, where)
        types[name] = known
        if len(types) > _MOST_CHECKED:
            types.popitem(last=False)
        self.pixels += pixels
        if self.pixels > _MOST_LARGEST * most:
            # What was decoded is known when it comes again: this router may be new.
            raise ApiError(
                503,
                f"{where} makes this request's new images larger than "
                f"{_MOST_LARGEST * most:,} pixels; send it again",
                "unavailable",
                param=where,
                retry_after_s=1,
            )
        return known

    def _data(self, place: Place) -> tuple[str, bytes, str] | None:
        """Return media type, bytes, and base64 or its mark; None: to be fetched."""
        url = place.url
        if url is None and place.uuid is not None:
            data = self.reader.kept.get(("uuid", self.salt, _uuid(place)))
            if data is None:
                raise unfit(
                    place.where,
                    "names media by a uuid, and they are not here any more; send them whole",
                )
            return f"{place.kind}/*", data, self._lift(data)
        if not isinstance(url, str):
            raise unfit(place.where, "must have a URL")
        if url.startswith("data:"):
            return data_of(url, self.lifted.spans, place.where)
        if not url.startswith(_REMOTE):
            raise unfit(place.where, "must have a data:, http: or https: URL")
        data = self.fetched.get(url)
        if data is None:
            data = self.reader.kept.get(("url", self.salt, url))
        if data is None:
            self.missing.setdefault(url, place.where)
            return None
        self.kept[url] = data
        return f"{place.kind}/*", data, self._lift(data)

    def _lift(self, data: bytes) -> str:
        return self.lifted.add(base64.b64encode(data))


def _uuid(place: Place) -> str:
    if not isinstance(place.uuid, str) or len(place.uuid) > _LONGEST_UUID:
        raise unfit(place.where, f"must have a uuid of at most {_LONGEST_UUID} characters")
    return place.uuid


class _Kept:
    """Bytes by key, the least recently used dropped first. Several threads use it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._by: OrderedDict[tuple[str, str | None, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str | None, str]) -> bytes | None:
        with self._lock:
            found = self._by.get(key)
            if found is not None:
                self._by.move_to_end(key)
            return found

    def put(self, key: tuple[str, str | None, str], data: bytes) -> None:
        with self._lock:
            before = self._by.pop(key, None)
            self._bytes += self._size(key, data) - (
                0 if before is None else self._size(key, before)
            )
            self._by[key] = data
            # The newest stays, whatever its size: a request is waiting for it.
            while self._bytes > self._most_bytes and len(self._by) > 1:
                self._bytes -= self._size(*self._by.popitem(last=False))

    @staticmethod
    def _size(key: tuple[str, str | None, str], data: bytes) -> int:
        return _ENTRY_BYTES + len(key[2]) + len(data)


class FetchBudget:
    """Bytes that may be fetched for one request."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._left = most

    def take(self, count: int, where: str) -> None:
        """Count bytes that came; raise ApiError (400) once they are too many."""
        self._left -= count
        if self._left < 0:
            raise unfit(where, f"makes what is fetched longer than {self.most:,} bytes")


# --- Fetching -------------------------------------------------------------------------------------


async def fetched(url: str, where: str, domains: Iterable[str], budget: FetchBudget) -> bytes:
    """Return what is at a URL of these domains; raises ApiError (400) that names the part."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise unfit(where, "has no valid URL") from None
    if host is None or host.lower() not in {domain.lower() for domain in domains}:
        raise unfit(
            where,
            f"is at {(host or 'no host')[:100]!r}, which is not among the server's "
            "allowed_media_domains; send it as a data: URL",
        )
    if parts.username is not None or parts.password is not None:
        raise unfit(where, "has a user or a password in its URL; send it as a data: URL")
    if address_of(host) is not None and not is_public(host):
        # No name is resolved then.
        raise unfit(where, "is at an address that is not public")
    timeout = aiohttp.ClientTimeout(total=_FETCH_S)
    connector = aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise unfit(where, f"could not be fetched: its server answered {response.status}")
            data = bytearray()
            async for part in response.content.iter_any():
                budget.take(len(part), where)
                data += part
            return bytes(data)
    except TimeoutError:
        raise unfit(where, f"could not be fetched within {_FETCH_S:g} s") from None
    except aiohttp.ClientError as error:
        if isinstance(error.__cause__, NotPublic):
            raise unfit(where, "is at an address that is not public") from None
        raise unfit(where, "could not be fetched: no connection to its server") from None


class NotPublic(OSError):
    """A name stands for an address that is not public."""


class PublicResolver(aiohttp.ThreadedResolver):
    """Resolves names to public addresses; raises `NotPublic` if any other is among them."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        if not all(is_public(one["host"]) for one in found):
            raise NotPublic
        return found


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, and so is an IPv4 address within it."""
    known = address_of(address)
    if known is None:
        return False
    if isinstance(known, ipaddress.IPv6Address):
        inner = known.ipv4_mapped or known.sixtofour
        if inner is None and known in _NAT64:
            inner = ipaddress.IPv4Address(int(known) & 0xFFFFFFFF)
        if inner is not None:
            known = inner
    return known.is_global and not known.is_multicast and not known.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
