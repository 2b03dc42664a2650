"""Streams and CUDA graphs for each place of the border between decoding's SMs and prefill's.

AgentServe (section III-C) makes contexts for ten slots before it serves, and rebinds threads to
them in microseconds. Here the ten slots are tenths of the engine's lease, so the ledger is not
asked. `conserve_inside.policy.DecodeReserve` decides where the border goes.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from conserve_inside.sm_slots.means import NoSms, SmMeans
from hetero.engine_needs import GRAPH_SETS_BYTES
from hetero.sm_units import SM_SLOTS, SmSplit


class Sides(NamedTuple):
    """Decoding's units and SMs at one border, and the rest, which prefill has."""

    decode: range
    prefill: range
    decode_sms: int


def sides(split: SmSplit, units: range) -> tuple[Sides, ...]:
    """Return the sides for each border, by decoding's size, the smallest first; the last has all.

    Slot ``k`` has at least ``k`` tenths of the lease in whole units; equal slots are one.
    """
    total_sms = split.sms_of(units)
    found: list[Sides] = []
    for slot in range(1, SM_SLOTS + 1):
        decode = split.lowest(units, -(-total_sms * slot // SM_SLOTS))
        if not found or decode != found[-1].decode:
            prefill = range(decode.stop, units.stop)
            found.append(Sides(decode, prefill, split.sms_of(decode)))
    return tuple(found)


class Bound(NamedTuple):
    """The streams that decoding and prefill run on now; None: vLLM's own, and any stream."""

    decode_stream: Any
    lane_stream: Any
    decode_sms: int


class SlotPairs:
    """An engine's pairs of streams, used by the thread that runs its steps.

    ``wrap`` makes torch's stream of a handle, and ``make_current`` has steps run on one.

    Attributes:
        sizes_sms: how many SMs decoding may have, ascending; the last is the whole lease. Empty
            where the border cannot move.
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
        self._places = () if split is None or means.stream(units) is None else sides(split, units)
        self._streams: dict[range, Any] = {}
        for place in self._places:
            # All streams are made now, since making one takes long and binding does not.
            self._stream(place.decode)
            if place.prefill:
                self._stream(place.prefill)
        self.sizes_sms = tuple(place.decode_sms for place in self._places)
        self.bound = Bound(None, None, 0)
        if self._places:
            # The engine was loaded on these, so that work comes before the first border.
            self.bound = self._of(self._places[-1], self.sizes_sms[-1])

    def bind(self, decode_sms: int) -> Bound:
        """Move the border, between two steps; decoding gets at least this many SMs, or all.

        With 0, prefill has all. Where decoding has all, prefill shares SMs. Work that either side
        has begun comes first on its new stream, and decoding's becomes the thread's current one.
        """
        if not self._places:
            return self.bound
        place = next((p for p in self._places if p.decode_sms >= decode_sms), self._places[-1])
        bound = self._of(place, decode_sms)
        old, self.bound = self.bound, bound
        for before, after in zip(old[:2], bound[:2], strict=True):
            if before is not None and before is not after:
                after.wait_stream(before)
        if bound.decode_stream is not old.decode_stream:
            self._make_current(bound.decode_stream)
        return bound

    def _of(self, place: Sides, decode_sms: int) -> Bound:
        lane = place.prefill
        if decode_sms <= 0:
            lane = self._places[-1].decode
        elif not lane:
            # Prefill's smallest side. A lease of one unit has none, and shares its SMs.
            lane = next((p.prefill for p in reversed(self._places) if p.prefill), place.decode)
        return Bound(self._stream(place.decode), self._stream(lane), place.decode_sms)

    def _stream(self, units: range) -> Any:
        if units not in self._streams:
            handle = self._means.stream(units)
            assert handle is not None
            self._streams[units] = self._wrap(handle)
        return self._streams[units]


_make: Callable[[], SlotPairs] | None = None
_pairs: SlotPairs | None = None


def provide(make: Callable[[], SlotPairs]) -> None:
    global _make, _pairs
    _make, _pairs = make, None


def _none() -> SlotPairs:
    return SlotPairs(NoSms(), None, range(0), lambda handle: None, lambda stream: None)


def slot_pairs() -> SlotPairs:
    """Return this worker's pairs. They cannot move on a CPU, or where no SMs are leased."""
    global _pairs
    if _pairs is None:
        _pairs = _none() if _make is None else _make()
    return _pairs


logger = logging.getLogger("vllm.conserve")


class GraphSets:
    """An engine's graphs, captured again for each smaller size of decoding's side, within a budget.

    A graph runs on the SMs of the stream that it was captured on; vLLM captures on all of the
    engine's. Used of vLLM 0.32: its runners' ``capture_model`` captures whatever has no graph, on
    the current stream, and returns the bytes that it took. The graphs of the first runner, and of
    both runners' pieces, are ``concrete_cudagraph_entries`` of each ``CUDAGraphWrapper``. With
    ``VLLM_USE_BREAKABLE_CUDAGRAPH``, pieces are ``entries`` of each ``BreakableCUDAGraphWrapper``.
    Those of the second runner are ``graphs`` of its ``cudagraph_manager``.
    """

    def __init__(self, runner: Any, pairs: SlotPairs, budget_bytes: int = GRAPH_SETS_BYTES) -> None:
        self._runner = runner
        self._pairs = pairs
        self._budget_bytes = budget_bytes
        self._holders = _holders(runner)
        self._all = self._now = self._held()
        self._sets: dict[int, list[dict[Any, Any]]] = {}

    @property
    def sizes_sms(self) -> tuple[int, ...]:
        """Return the sizes with graphs of their own; others run on all of the engine's SMs."""
        return tuple(self._sets)

    def capture(self) -> None:
        """Capture for each size, the smallest first, where the border is in calm."""
        sizes_sms = self._pairs.sizes_sms
        if not any(self._all) or not sizes_sms:
            return
        taken_bytes = most_bytes = 0
        try:
            for size_sms in sizes_sms[:-1]:
                if taken_bytes + most_bytes > self._budget_bytes:
                    break
                self._pairs.bind(size_sms)
                self._put([{} for _ in self._holders])
                took_bytes = max(0, int(self._runner.capture_model()))
                taken_bytes, most_bytes = taken_bytes + took_bytes, max(most_bytes, took_bytes)
                self._sets[size_sms] = self._held()
        finally:
            self._pairs.bind(sizes_sms[-1])
            self._put(self._all)
        logger.info(
            "CUDA graphs for %d of %d sizes of decoding's SMs, %.2f GiB more",
            len(self._sets) + 1, len(sizes_sms), taken_bytes / 2**30,
        )  # fmt: skip

    def use(self, decode_sms: int) -> None:
        graphs = self._sets.get(decode_sms, self._all)
        if graphs is not self._now:
            self._put(graphs)

    def _held(self) -> list[dict[Any, Any]]:
        return [getattr(holder, name) for holder, name in self._holders]

    def _put(self, graphs: list[dict[Any, Any]]) -> None:
        self._now = graphs
        for (holder, name), one in zip(self._holders, graphs, strict=True):
            setattr(holder, name, one)


def _holders(runner: Any) -> list[tuple[Any, str]]:
    """Return the objects that hold graphs, with their attributes' names, in a fixed order."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    found = [(one, "concrete_cudagraph_entries") for one in CUDAGraphWrapper._all_instances]
    found += [(one, "entries") for one in BreakableCUDAGraphWrapper._all_instances]
    manager = getattr(runner, "cudagraph_manager", None)
    return found if manager is None else [*found, (manager, "graphs")]
