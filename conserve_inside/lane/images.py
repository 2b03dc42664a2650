"""The scheduler's half of encodes in the lane: which images go there, and when they are ready.

An image that the lane has encoded is put into vLLM's encoder cache, where steps and the lane's own
prefills find it. No request refers to it there until it is scheduled, so a request that waits for
room never keeps the cache from one that runs. If it is evicted meanwhile, it is encoded again. The
lane's own encodes evict no image of a request that has all of its own, and waits for something
else.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from conserve.wire import Encoded
from conserve_inside.policy import Stages

# Encodes for a request are this many times its images. Then steps encode the rest of them.
_MOST_TRIES = 2


EncodeOutcome = Literal["done", "failed", "cut"]


@dataclass(frozen=True, slots=True)
class Encode:
    """One image of a request, vLLM's ``MultiModalFeatureSpec``, to be encoded in the lane."""

    request_id: str
    image: Any


@dataclass(frozen=True, slots=True)
class Found:
    """The embeddings of an image that the node has, as `NodeEncoderCache` writes them."""

    identifier: str
    data: bytes


@dataclass(frozen=True, slots=True)
class EncodeEnd:
    """The end of an `Encode`: ``cut`` if its request ended first."""

    outcome: EncodeOutcome
    lasted_s: float


@dataclass(slots=True)
class _Waits:
    """A request that needs images. Its prompt is found up to ``found_tokens``.

    ``looked`` is whether those that the node has are loaded.
    """

    since_s: float
    found_tokens: int
    ready_s: float | None = None
    tries: int = 0
    encode_s: float = 0.0
    inline: bool = False
    looked: bool = False


class LaneImages:
    """The images that one engine's requests wait for."""

    def __init__(self, scheduler: Any, stages: Stages) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.encoder_cache_manager
        self._stages = stages
        self._waits: dict[str, _Waits] = {}
        # Requests with all of their images in the cache that have not begun.
        self._ready: dict[str, Any] = {}
        # The encode in the lane: its request, and the image's number.
        self._current: tuple[Any, int] | None = None
        self._current_was_freed = False

    def are_ready(self, request: Any, found_tokens: int) -> bool:
        """Return whether a request may go on; otherwise it waits for an encode, in its place."""
        name = request.request_id
        waits = self._waits.get(name)
        if waits is not None and waits.inline:
            return True
        missing = self.missing(request, found_tokens)
        if not missing:
            self._stages.forget(name)
            if waits is not None and waits.ready_s is None:
                waits.ready_s = self._scheduler.clock()
                self._ready[name] = request
            return True
        if waits is None:
            if not self._fits(request, found_tokens):
                return True
            waits = self._waits[name] = _Waits(self._scheduler.clock(), found_tokens)
        if self._ready.pop(name, None) is not None or waits.ready_s is not None:
            # Some were evicted.
            waits.ready_s, waits.looked = None, False
        waits.found_tokens = found_tokens
        self._stages.wants(name)
        return False

    def were_freed(self, identifiers: Collection[str]) -> None:
        """Note images that the worker drops with the next step."""
        if self._current is not None:
            request, number = self._current
            # A step has encoded it, too. The worker may drop it after the lane has kept it.
            self._current_was_freed |= request.mm_features[number].identifier in identifiers

    def loads(self) -> tuple[Found, ...]:
        """Return images that the worker loads with its next step, beside whatever the lane does."""
        node, found = self._scheduler.ec_connector, []
        for name in () if node is None else self._stages.waiting:
            request, waits = self._scheduler.requests[name], self._waits[name]
            if waits.looked:
                continue
            waits.looked = True
            for number in self.missing(request, waits.found_tokens):
                if request.get_num_encoder_embeds(number) > self._room(request):
                    waits.looked = False
                    break
                identifier = request.mm_features[number].identifier
                data = node.take(identifier)
                if data is not None:
                    self._keep(request, number)
                    node.took(name, Encoded(node_images=1))
                    found.append(Found(identifier, data))
        return tuple(found)

    def next(self) -> Encode | None:
        """Return the image that the lane encodes next, if it may begin now. Ask after `loads`."""
        while (name := self._stages.next_encode()) is not None:
            request, waits = self._scheduler.requests[name], self._waits[name]
            missing = self.missing(request, waits.found_tokens)
            if missing and waits.tries >= _MOST_TRIES * len(request.mm_features):
                waits.inline = True
            if not missing:
                self._ready[name] = request
            if not missing or waits.inline:
                self._stages.forget(name)
                continue
            number = missing[0]
            if request.get_num_encoder_embeds(number) > self._room(request):
                self._stages.puts_off()
                return None
            waits.tries += 1
            self._stages.encodes(name)
            self._current, self._current_was_freed = (request, number), False
            return Encode(name, request.mm_features[number])
        return None

    def hears(self, end: EncodeEnd) -> int:
        """Note an encode's end; returns how many embeddings were computed."""
        assert self._current is not None
        (request, number), self._current = self._current, None
        self._stages.encoded()
        waits = self._waits.get(request.request_id)
        if end.outcome == "failed" and waits is not None:
            # An encoder that fails in a step is tried again there, and its turn ends.
            waits.inline = True
            self._stages.forget(request.request_id)
        if end.outcome != "done":
            return 0
        if self._current_was_freed:
            self._cache.freed.append(request.mm_features[number].identifier)
        else:
            self._keep(request, number)
        embeds = int(request.get_num_encoder_embeds(number))
        if waits is not None:
            waits.encode_s += end.lasted_s
            if self._scheduler.ec_connector is not None:
                self._scheduler.ec_connector.took(request.request_id, Encoded(1, embeds))
        return embeds

    def refer(self, request: Any, start: int, end: int) -> None:
        """Keep the images of a prompt's part in the cache while the lane computes that."""
        for number in _numbers(request, start, end):
            kept = self._cache.check_and_update_cache(request, number)
            assert kept, "an image of a prompt in the lane is not in the encoder cache"

    def runs(self, name: str) -> None:
        """Note that a request has begun, in a step or in the lane."""
        self._ready.pop(name, None)

    def over(self, name: str) -> tuple[float, float]:
        """Forget a request; returns how long it waited for encodes, and how long these took."""
        self._stages.forget(name)
        self._ready.pop(name, None)
        waits = self._waits.pop(name, None)
        if waits is None:
            return 0.0, 0.0
        until_s = self._scheduler.clock() if waits.ready_s is None else waits.ready_s
        return max(0.0, until_s - waits.since_s - waits.encode_s), waits.encode_s

    def missing(self, request: Any, found_tokens: int) -> list[int]:
        """Return the numbers of images that a prompt needs, and the encoder cache lacks."""
        cached = self._cache.cached
        numbers = _numbers(request, found_tokens, request.num_tokens)
        return [one for one in numbers if request.mm_features[one].identifier not in cached]

    def _fits(self, request: Any, found_tokens: int) -> bool:
        """Return whether all images that a request needs can be in the cache together."""
        numbers = _numbers(request, found_tokens, request.num_tokens)
        each = {
            request.mm_features[one].identifier: request.get_num_encoder_embeds(one)
            for one in numbers
        }
        return int(sum(each.values())) <= int(self._cache.cache_size)

    def _room(self, request: Any) -> int:
        """Return how many embeddings the cache can take for a request that others do not need."""
        freeable = self._cache.freeable
        kept = sum(freeable[one] for one in self._wanted(request))
        return int(self._cache.num_freeable_slots - kept)

    def _wanted(self, request: Any) -> set[str]:
        """Return images that vLLM could evict, and ready requests, the next or this one want."""
        wanted: set[str] = set()
        heads = [self._scheduler.requests[name] for name in self._stages.waiting[:1]]
        for one in (*self._ready.values(), *heads, request):
            waits = self._waits.get(one.request_id)
            if waits is None:
                continue
            numbers = _numbers(one, waits.found_tokens, one.num_tokens)
            wanted |= {one.mm_features[number].identifier for number in numbers}
        return wanted.intersection(self._cache.freeable)

    def _keep(self, request: Any, number: int) -> None:
        """Enter an image, which the worker has, into vLLM's account."""
        identifier = request.mm_features[number].identifier
        if identifier in self._cache.cached:
            return
        for one in self._wanted(request):
            # The oldest ones are evicted.
            self._cache.freeable.move_to_end(one)
        if self._cache.can_allocate(request, number, sys.maxsize, 0):
            self._cache.allocate(request, number)
            self._cache.free_encoder_input(request, number)
        else:
            # vLLM tells the worker to drop it.
            self._cache.freed.append(identifier)


def _numbers(request: Any, start: int, end: int) -> list[int]:
    """Return the numbers of the images with embeddings at positions from ``start`` to ``end``."""
    found = []
    for number, image in enumerate(request.mm_features or ()):
        place = image.mm_position
        first, last = max(0, start - place.offset), min(place.length, end - place.offset)
        if first < last:
            begin, stop = place.get_embeds_indices_in_range(first, last)
            if begin < stop:
                found.append(number)
    return found
