"""Decoding's and prefill's streams, for each place of the border between their SMs.

AgentServe (§III-C) makes contexts for ten slots before it serves, and rebinds threads to them in
microseconds. Here an engine's ten slots are tenths of its lease: the border moves without a word to
the ledger. What decides where it goes is `conserve.engine_scheduling.DecodeReserve`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from hetero.sm_means import NoSms, SmMeans
from hetero.sm_units import Sides, SmSplit, sides


class Bound(NamedTuple):
    """Tells where decoding and prefill run now.

    Attributes:
        decode_stream: of the worker's steps; None: as vLLM has it.
        lane_stream: of prefills beside them; None: any stream.
        decode_sms, lane_sms: how many SMs each stream has; 0 where that is not known.
    """

    decode_stream: Any
    lane_stream: Any
    decode_sms: int
    lane_sms: int


class SlotPairs:
    """An engine's pairs of streams; one thread, the one that runs its steps.

    Args:
        means: what streams keep to SMs by; where it has no streams, the border cannot move.
        split: of the GPU.
        units: of the engine's lease.
        wrap: makes torch's stream of a handle.
        make_current: has the engine's steps run on a stream from now on.

    Attributes:
        sizes_sms: what decoding may have, the smallest first; the last is all of the lease. None
            where nothing moves the border.
    """

    def __init__(
        self,
        means: SmMeans,
        split: SmSplit | None,
        units: range,
        wrap: Callable[[int], Any],
        make_current: Callable[[Any], None],
    ) -> None:
        self._means = means
        self._wrap = wrap
        self._make_current = make_current
        self._split = split
        self._places = () if split is None else sides(split, units)
        if self._places and means.stream(units) is None:
            self._places = ()
        self._streams: dict[range, Any] = {}
        for place in self._places:
            # All that will ever be bound, now: that is what costs.
            self._stream(place.decode)
            if place.prefill:
                self._stream(place.prefill)
        self.sizes_sms = tuple(place.decode_sms for place in self._places)
        self._bound = Bound(None, None, 0, 0)
        if self._places:
            # As the engine was loaded: whatever it has begun there comes before the first border.
            self._bound = self._of(self._places[-1], self.sizes_sms[-1])

    @property
    def bound(self) -> Bound:
        """Return what was bound last."""
        return self._bound

    def bind(self, decode_sms: int) -> Bound:
        """Move the border, between two steps: decoding gets at least so many SMs.

        That is the smallest of its sizes with as many, and all if there is none; with 0 it is
        prefill that has all. What either has begun on its former stream comes first on the new
        one. Decoding's becomes the calling thread's current stream.

        Where decoding has all, prefill's is the smallest it has: nobody is meant to be there, and
        whoever is, shares.
        """
        if not self._places:
            return self._bound
        place = next(
            (one for one in self._places if one.decode_sms >= decode_sms), self._places[-1]
        )
        bound = self._of(place, decode_sms)
        old, self._bound = self._bound, bound
        for before, after in (
            (old.decode_stream, bound.decode_stream),
            (old.lane_stream, bound.lane_stream),
        ):
            if before is not None and before is not after:
                after.wait_stream(before)
        if bound.decode_stream is not old.decode_stream:
            self._make_current(bound.decode_stream)
        return bound

    def _of(self, place: Sides, decode_sms: int) -> Bound:
        assert self._split is not None
        lane = place.prefill
        if decode_sms <= 0:
            lane = self._places[-1].decode
        elif not lane:
            # The last of those that are not empty; a lease of one unit has none, and shares it.
            lane = next(
                (one.prefill for one in reversed(self._places) if one.prefill), place.decode
            )
        return Bound(
            self._stream(place.decode),
            self._stream(lane),
            place.decode_sms,
            self._split.sms_of(lane),
        )

    def _stream(self, units: range) -> Any:
        if units not in self._streams:
            handle = self._means.stream(units)
            assert handle is not None
            self._streams[units] = self._wrap(handle)
        return self._streams[units]


_make: Callable[[], SlotPairs] | None = None
_pairs: SlotPairs | None = None


def provide(make: Callable[[], SlotPairs]) -> None:
    """Say how this process's pairs are made, once somebody asks for them."""
    global _make, _pairs
    _make, _pairs = make, None


def _none() -> SlotPairs:
    return SlotPairs(NoSms(), None, range(0), lambda handle: None, lambda stream: None)


def slot_pairs() -> SlotPairs:
    """This worker's pairs; ones that cannot move where it has leased no SMs, or on a CPU."""
    global _pairs
    if _pairs is None:
        _pairs = _none() if _make is None else _make()
    return _pairs
