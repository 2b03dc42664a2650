"""Layers of a tower take turns in a few slots: each runs with its own weights, or not at all."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conserve_inside.addon import TOWER_LAYERS
from conserve_inside.tower import connector
from conserve_inside.tower import offload as module
from conserve_inside.tower.offload import LayerMissing, OffloadedTower, layers_of_tower, offload

CPU = torch.device("cpu")
VALUES = 3


class Layer(nn.Module):
    """Its output tells which layers ran, and in which order."""

    def __init__(self, number: int) -> None:
        super().__init__()
        # Of several kinds and strides.
        self.weight = nn.Parameter(torch.full((VALUES, 2), float(number + 2)).t(), False)
        self.scale = nn.Parameter(torch.tensor(number + 1, dtype=torch.bfloat16), False)
        self.register_buffer("bias", torch.arange(VALUES, dtype=torch.int64) + number)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("broken off")
        return (x * self.weight.sum(0) + self.bias * self.scale) % 1009


def stack(layers: int) -> nn.ModuleList:
    return nn.ModuleList(Layer(number) for number in range(layers))


def encoded(layers: nn.ModuleList, image: int) -> list[float]:
    x = torch.full((VALUES,), float(image))
    for layer in layers:
        x = layer(x)
    return x.tolist()


def break_off(layers: nn.ModuleList, at: int) -> None:
    layers[at].fails = True
    with pytest.raises(ValueError, match="broken off"):
        encoded(layers, 0)
    layers[at].fails = False


sizes = st.integers(2, 12).flatmap(
    lambda count: st.tuples(st.just(count), st.integers(1, count - 1))
)


@given(sizes, st.lists(st.none() | st.integers(0, 11), max_size=6))
def test_each_layer_has_its_own_weights_in_every_pass(
    size: tuple[int, int], passes: list[int | None]
) -> None:
    """Also behind passes that are broken off at some layer."""
    count, kept = size
    layers, alone = stack(count), stack(count)
    tower = OffloadedTower(layers, kept, CPU)
    for number, broken_at in enumerate([*passes, None, None]):
        if broken_at is not None:
            break_off(layers, broken_at % count)
            continue
        # A thread of its own, as each encode may have.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(encoded, layers, number).result()
        assert found == encoded(alone, number)
    # They do have to take turns: there are no more weights than slots.
    for name, tensor in layers[0].state_dict().items():
        places = {layer.state_dict()[name].data_ptr() for layer in layers}
        assert len(places) == kept, (name, tensor)
    assert tower.freed_bytes == (count - kept) * tower.layer_bytes


def test_a_copy_that_could_not_begin_is_no_layer() -> None:
    layers, alone = stack(5), stack(5)
    tower = OffloadedTower(layers, 2, CPU)
    begin, fails = tower._copies.begin, [True]

    def begun(*arguments: Any) -> None:
        if fails.pop():
            raise RuntimeError("the driver is out of order")
        begin(*arguments)

    tower._copies.begin = begun  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of order"):
        encoded(layers, 1)
    fails[:] = [False] * 20
    with pytest.raises(LayerMissing, match=r"layer 2 .* has no layer"):
        layers[2](torch.ones(VALUES))
    assert encoded(layers, 1) == encoded(alone, 1)


def test_layers_out_of_order_do_not_run() -> None:
    layers = stack(4)
    OffloadedTower(layers, 2, CPU)
    x = torch.ones(VALUES)
    with pytest.raises(LayerMissing, match=r"layer 3 .* its slot has layer 1; this image is not"):
        layers[3](x)
    layers[1](x)
    with pytest.raises(LayerMissing, match=r"layer 1 .* its slot has layer 3"):
        layers[1](x)


def test_what_all_layers_share_stays_where_it_is() -> None:
    layers, table = stack(4), torch.arange(8.0)
    for layer in layers:
        layer.register_buffer("table", table)
    OffloadedTower(layers, 1, CPU)
    encoded(layers, 1)
    assert {layer.table.data_ptr() for layer in layers} == {table.data_ptr()}


def test_layers_that_differ_are_refused() -> None:
    layers = stack(3)
    layers[2].weight = nn.Parameter(torch.ones(2, VALUES), False)
    with pytest.raises(RuntimeError, match="layer 2 of the vision tower has other weights than"):
        OffloadedTower(layers, 2, CPU)
    with pytest.raises(RuntimeError, match="have no weights of their own"):
        OffloadedTower([nn.GELU(), nn.GELU(), nn.GELU()], 2, CPU)


class Model(nn.Module):
    """A model with two towers, as its class names them to vLLM."""

    _tower_model_names = ("visual",)

    def __init__(self) -> None:
        super().__init__()
        self.language = nn.ModuleList(stack(9))
        self.visual = nn.Module()
        self.visual.blocks = stack(5)
        self.visual.mergers = stack(3)
        self.audio = nn.Module()
        self.audio.layers = stack(4)

    def get_mm_mapping(self) -> Any:
        return SimpleNamespace(tower_model=["audio."])


def test_the_longest_list_within_a_models_towers_is_the_towers() -> None:
    model = Model()
    assert layers_of_tower(model) == ("visual.blocks", model.visual.blocks)
    del model.visual
    assert layers_of_tower(model)[0] == "audio.layers"
    with pytest.raises(RuntimeError, match="has loaded no tower with layers; unset it"):
        layers_of_tower(nn.Module())


def test_nothing_is_offloaded_where_all_layers_stay() -> None:
    assert offload(Model(), 5, CPU) is None
    tower = offload(Model(), 2, CPU)
    assert tower is not None
    assert (tower.freed_bytes, tower.host_bytes) == (3 * 768, 5 * 768)


def test_a_worker_is_prepared_to_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(connector, "load_with_tower_on_host", lambda _, kept: told.append(kept))

    def prepare(kept: int, compiles: bool) -> None:
        told, plain = {TOWER_LAYERS: kept}, {"cudagraph_mm_encoder": False}
        config: Any = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(get_from_extra_config=told.get),
            parallel_config=SimpleNamespace(world_size=1),
            compilation_config=SimpleNamespace(compile_mm_encoder=compiles, **plain),
        )
        connector.prepare_worker(config)

    prepare(2, compiles=False)
    assert told == [2]
    with pytest.raises(RuntimeError, match=r"compile_mm_encoder would run .* unset one of them"):
        prepare(2, compiles=True)


# --- Copies beside kernels, on a stand-in for CUDA's streams and events ---------------------------


class Stream:
    """Runs what is launched on it in its order, at any later time."""

    def __init__(self, *_: Any) -> None:
        self.launched: deque[Callable[[], bool]] = deque()
        device.streams.append(self)

    def launch(self, work: Callable[[], Any]) -> None:
        self.launched.append(lambda: (work(), True)[1])

    def wait_event(self, event: "Event") -> None:
        # The last record before this call counts; without one there is nothing to wait for.
        awaited = event.record_of
        if awaited is not None:
            self.launched.append(awaited.is_set)


class Event:
    def __init__(self) -> None:
        self.record_of: threading.Event | None = None

    def record(self, stream: Stream) -> None:
        mark = self.record_of = threading.Event()
        stream.launch(mark.set)


class Device:
    """All streams; it runs what they have in an order of its own."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current: Stream | None = None

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, rng: random.Random, most: float = float("inf")) -> None:
        """Run as much as this, or all."""
        while most > 0 and any(one.launched for one in self.streams):
            ready = [one for one in self.streams if one.launched]
            rng.shuffle(ready)
            for stream in ready:
                if stream.launched[0]():
                    stream.launched.popleft()
                    break
            else:
                raise AssertionError("the streams wait for each other")
            most -= 1


device = Device()


class Kernel(nn.Module):
    """A layer whose weights are read when the device comes to it."""

    def __init__(self, number: int, read: list[tuple[int, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(number)), False)
        self.number, self.fails, self._read = number, False, read

    def forward(self) -> None:
        weight = self.weight.data
        assert device.current is not None
        device.current.launch(lambda: self._read.append((self.number, float(weight[0]))))
        device.current.launch(lambda: self._read.append((self.number, float(weight[1]))))
        if self.fails:
            raise ValueError("broken off")


@given(size=sizes, seed=st.integers(0, 2**32))
def test_kernels_and_copies_on_several_streams_never_meet_in_a_slot(
    size: tuple[int, int], seed: int
) -> None:
    """Whatever the device runs first, with passes on two streams, some of them broken off."""
    count, kept = size
    rng, read = random.Random(seed), list[tuple[int, float]]()
    layers = nn.ModuleList(Kernel(number, read) for number in range(count))
    device.__init__()  # type: ignore[misc]
    streams = [Stream(), Stream()]
    copy = torch.Tensor.copy_

    def launched(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if not non_blocking:
            return copy(target, source)
        assert device.current not in (None, *streams)
        device.current.launch(lambda: copy(target, source))  # type: ignore[union-attr]
        return target

    with pytest.MonkeyPatch.context() as patch, device.on(streams[0]):
        patch.setattr(torch.Tensor, "copy_", launched)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", device.on)
        patch.setattr(torch.cuda, "current_stream", lambda _: device.current)
        patch.setattr(module, "_Copies", lambda: module._CudaCopies(kept, CPU))
        OffloadedTower(layers, kept, CPU)
        for number in range(5):
            broken_at = rng.choice([None, rng.randrange(count)])
            # A pass on another stream comes behind the last one's output.
            with device.on(streams[number % 2]):
                for layer in layers:
                    layer.fails = layer.number == broken_at
                    if layer.fails:
                        with pytest.raises(ValueError, match="broken off"):
                            layer()
                        break
                    layer()
            device.run(rng, rng.randrange(4 * count))
        device.run(rng)
    assert read
    assert [(number, float(number)) for number, _ in read] == read
