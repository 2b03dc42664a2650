"""CUDA graphs for each place of the border between an engine's steps and its lane.

A graph runs on the SMs of the stream that it was captured on, wherever it is launched. vLLM
captures once, on all of the engine's; here its graphs are captured again on each smaller size of
decoding's side, and exchanged as the border moves.

Used of vLLM 0.29: the ``capture_model`` of its runners captures whatever has no graph yet, on the
stream that is current (`captures`), and says how many bytes that took; the graphs of the first
runner, and pieces' of both, are the ``concrete_cudagraph_entries`` of each ``CUDAGraphWrapper``;
those of the second are the ``graphs`` of its ``cudagraph_manager``.
"""

import logging
from typing import Any

from deployments.engine.sm_slots.pairs import SlotPairs
from hetero.gpu_layout import GRAPH_SETS_BYTES

logger = logging.getLogger("vllm.conserve")


class GraphSets:
    """An engine's, after vLLM has captured its graphs.

    Without graphs (``enforce_eager``), and where no border moves, there is nothing to exchange.

    Args:
        runner: vLLM's model runner.
        pairs: the engine's; where decoding's side is bound, graphs are captured.
        budget_bytes: when all sets but vLLM's own have taken so much, or the next one would exceed
            it, no other is made. One is made in any case: nobody knows before what it takes.

    Attributes:
        sizes_sms: those that have graphs of their own. On the others graphs run on all of the
            engine's SMs, as vLLM has captured them.
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
        """See above."""
        return tuple(self._sets)

    def capture(self) -> None:
        """Capture for each size, the smallest first: that is where the border is in calm."""
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
        """Have steps run the graphs of a size, from now on."""
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
    """Return who has graphs, and under which name, in an order that stays."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    found = [(one, "concrete_cudagraph_entries") for one in CUDAGraphWrapper._all_instances]
    manager = getattr(runner, "cudagraph_manager", None)
    return found if manager is None else [*found, (manager, "graphs")]
