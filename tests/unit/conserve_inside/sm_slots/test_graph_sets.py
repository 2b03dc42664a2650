"""CUDA graphs for each place of the border: captured once each, and exchanged as it moves."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper

from conserve_inside.sm_slots.pairs import Bound, GraphSets

SIZES_SMS = (16, 72, 132)


class Pairs:
    """As `SlotPairs`, without streams."""

    sizes_sms = SIZES_SMS

    def __init__(self) -> None:
        self.bound = Bound(None, None, 132)

    def bind(self, decode_sms: int) -> Bound:
        size = next(one for one in SIZES_SMS if one >= decode_sms)
        self.bound = Bound(None, None, size)
        return self.bound


class Piece:
    """As one of `CUDAGraphWrapper`."""

    def __init__(self) -> None:
        self.concrete_cudagraph_entries: dict[int, int] = {}


class Runner:
    """As vLLM's second one: its graphs remember on how many SMs they were captured."""

    def __init__(self, pairs: Any, costs_bytes: int = 100) -> None:
        self.cudagraph_manager = SimpleNamespace(graphs={})
        self.piece = Piece()
        # As one of `BreakableCUDAGraphWrapper`.
        self.breakable = SimpleNamespace(entries={})
        self._pairs = pairs
        self._costs_bytes = costs_bytes
        self.captured = 0

    def capture_model(self) -> int:
        self.captured += 1
        for graphs in self._graphs():
            for tokens in (1, 8):
                # As vLLM has it, for the second runner's.
                assert tokens not in graphs
                graphs[tokens] = self._pairs.bound.decode_sms
        return self._costs_bytes

    def runs_on(self) -> set[int]:
        return {size for graphs in self._graphs() for size in graphs.values()}

    def _graphs(self) -> tuple[dict[int, int], ...]:
        return (
            self.cudagraph_manager.graphs,
            self.piece.concrete_cudagraph_entries,
            self.breakable.entries,
        )


@pytest.fixture
def pairs() -> Any:
    return Pairs()


def of(runner: Runner, pairs: Any, monkeypatch: pytest.MonkeyPatch, **more: int) -> GraphSets:
    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", {runner.piece})
    monkeypatch.setattr(BreakableCUDAGraphWrapper, "_all_instances", [runner.breakable])
    return GraphSets(runner, pairs, **more)


def test_each_size_runs_graphs_that_were_captured_on_it(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(pairs)
    runner.capture_model()
    sets = of(runner, pairs, monkeypatch)
    sets.capture()
    assert sets.sizes_sms == (16, 72)
    # vLLM's own are back, and so is the border.
    assert runner.runs_on() == {132}
    assert pairs.bound.decode_sms == 132
    for size in (16, 72, 132, 72, 72, 16):
        sets.use(pairs.bind(size).decode_sms)
        assert runner.runs_on() == {size}
    assert runner.captured == 3


def test_sets_keep_to_their_budget(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(pairs)
    runner.capture_model()
    sets = of(runner, pairs, monkeypatch, budget_bytes=150)
    sets.capture()
    assert sets.sizes_sms == (16,)
    # On the others graphs run on all SMs.
    sets.use(72)
    assert runner.runs_on() == {132}
