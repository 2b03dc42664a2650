"""CUDA graphs for each place of the border: captured once each, and exchanged as it moves."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from conserve_inside.sm_slots.means import NoSms
from conserve_inside.sm_slots.pairs import Bound, GraphSets, SlotPairs

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
        self.fails_at: int | None = None

    def capture_model(self) -> int:
        self.captured += 1
        if self.captured == self.fails_at:
            raise MemoryError("no room")
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


def test_where_capturing_fails_vllms_own_are_left(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(pairs)
    runner.capture_model()
    runner.fails_at = 3
    sets = of(runner, pairs, monkeypatch)
    with pytest.raises(MemoryError):
        sets.capture()
    assert runner.runs_on() == {132}
    assert pairs.bound.decode_sms == 132


def test_without_graphs_or_a_border_nothing_is_captured(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = Runner(pairs)
    of(eager, pairs, monkeypatch).capture()
    assert eager.captured == 0
    unmoved = SlotPairs(NoSms(), None, range(0), lambda handle: None, lambda stream: None)
    runner = Runner(pairs)
    runner.capture_model()
    sets = of(runner, unmoved, monkeypatch)
    sets.capture()
    sets.use(0)
    assert runner.captured == 1
    assert runner.runs_on() == {132}


def test_this_vllm_has_its_graphs_where_they_are_looked_for() -> None:
    """It names nothing of this as an interface."""
    assert hasattr(CUDAGraphWrapper, "_all_instances")
    assert "self.concrete_cudagraph_entries:" in inspect.getsource(CUDAGraphWrapper.__init__)
    called = inspect.getsource(CUDAGraphWrapper.__call__)
    assert "self.concrete_cudagraph_entries[batch_descriptor]" in called
    breakable = BreakableCUDAGraphWrapper
    assert hasattr(breakable, "_all_instances")
    assert "self.entries:" in inspect.getsource(breakable.__init__)
    assert "self.entries.get(batch_descriptor)" in inspect.getsource(breakable.__call__)
    manager = cudagraph_utils.CudaGraphManager
    assert "self.graphs:" in inspect.getsource(manager.__init__)
    assert "self.graphs[desc]" in inspect.getsource(manager.run_fullgraph)
    for runner in (GPUModelRunner, model_runner.GPUModelRunner):
        assert "return cuda_graph_size" in inspect.getsource(runner.capture_model)
    assert "self.cudagraph_manager" in inspect.getsource(model_runner.GPUModelRunner.capture_model)
