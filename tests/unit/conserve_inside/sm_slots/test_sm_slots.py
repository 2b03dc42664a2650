"""An engine's worker on leased SMs: vLLM's own class, against a stand-in for CUDA's driver."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from vllm.distributed import parallel_state
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.utils import torch_utils
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from conserve_inside.sm_slots import green_contexts, pairs
from conserve_inside.sm_slots import lease as leasing
from conserve_inside.sm_slots.green_contexts import GreenContexts
from conserve_inside.sm_slots.lease import SLOT_WORKER, lease_of, tell_worker
from conserve_inside.sm_slots.means import MpsPercentage, NoSms
from conserve_inside.sm_slots.pairs import SlotPairs, slot_pairs
from conserve_inside.sm_slots.worker import SlotWorker
from deployments.engine.gpu_worker import EXTENSION
from hetero.nvml import UnknownGpu
from hetero.sm_slots import NoFreeSms, SmLease, SmSlotLedger
from hetero.sm_units import SmSlots, sm_granularity
from tests.unit.hetero.cuda_standin import Driver

GPU = "GPU-00000000-0000-0000-0000-000000000000"


class Stream:
    """Torch's stream, as far as it goes without a GPU."""

    def __init__(self, handle: int = 0, device: Any = None) -> None:
        self.handle = handle
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Stream]:
    """The thread's current stream, which there is none of here."""
    plain = Stream()
    now = [plain]

    def make_current(stream: Stream) -> None:
        now[0] = stream
        torch_utils._current_stream_tls.value = stream

    monkeypatch.setattr(torch.cuda, "set_stream", make_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[0])
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", plain, raising=False)
    return lambda: now[0]


@pytest.fixture
def unpatched() -> Iterator[None]:
    """VLLM captures as it did, and no pairs are left for the next test."""
    made = parallel_state.GraphCaptureContext
    yield
    parallel_state.GraphCaptureContext = made
    pairs._make = pairs._pairs = None


def h100() -> SmSlots:
    return SmSlots(132, sm_granularity((9, 0)))


# --- pairs of streams ------------------------------------------------------------------------


def of_the_whole_gpu(driver: Driver) -> SlotPairs:
    slots = h100()
    return SlotPairs(
        GreenContexts(slots, 0, driver), slots.split, range(16), Stream, torch.cuda.set_stream
    )


def test_the_sides_divide_the_sms_and_each_has_all_alone(current: Callable[[], Stream]) -> None:
    driver = Driver()
    made = of_the_whole_gpu(driver)
    calls = len(driver.calls)
    assert made.sizes_sms == (16, 32, 40, 56, 72, 80, 96, 112, 120, 132)
    for size in made.sizes_sms[:-1]:
        bound = made.bind(size)
        decode = driver.streams[bound.decode_stream.handle]
        lane = driver.streams[bound.lane_stream.handle]
        assert (len(decode), len(lane)) == (size, 132 - size)
        assert bound.decode_sms == size
        assert decode.isdisjoint(lane)
        assert current() is bound.decode_stream
    # Rounded up to a size that there is. The paper's example: 37 % is the slot of 40 %.
    assert made.bind(49).decode_sms == 56
    assert made.bind(1_000).decode_sms == 132
    assert len(driver.streams[made.bind(0).lane_stream.handle]) == 132
    assert len(driver.streams[made.bind(132).decode_stream.handle]) == 132
    # Moving makes no context.
    streams = {made.bind(size).decode_stream for size in (*made.sizes_sms, 0, *made.sizes_sms)}
    assert len(streams) == 10
    assert len(driver.calls) == calls


def test_work_that_was_begun_comes_first_on_the_new_side(current: Callable[[], Stream]) -> None:
    made = of_the_whole_gpu(Driver())
    loaded = made.bound
    assert loaded.decode_sms == 132
    first = made.bind(16)
    # An engine is loaded on all of its SMs.
    assert first.decode_stream.waited_for == [loaded.decode_stream]
    second = made.bind(72)
    assert second.decode_stream.waited_for == [first.decode_stream]
    assert second.lane_stream.waited_for == [first.lane_stream]
    again = made.bind(72)
    assert again == second == made.bound
    assert len(second.decode_stream.waited_for) == 1


@pytest.mark.parametrize("means", [MpsPercentage(), NoSms()])
def test_where_no_stream_keeps_to_sms_the_border_does_not_move(means: Any) -> None:
    split = h100().split if isinstance(means, MpsPercentage) else None
    made = SlotPairs(means, split, range(16), Stream, torch.cuda.set_stream)
    assert made.sizes_sms == ()
    assert made.bind(40) == (None, None, 0)


def test_a_lease_of_one_unit_is_shared(current: Callable[[], Stream]) -> None:
    slots = h100()
    made = SlotPairs(
        GreenContexts(slots, 0, Driver()), slots.split, range(3, 4), Stream, torch.cuda.set_stream
    )
    bound = made.bind(8)
    assert made.sizes_sms == (8,)
    assert bound.decode_stream is bound.lane_stream


# --- the worker ------------------------------------------------------------------------------


class Actor:
    """A node's actor, with a ledger; what Ray would carry."""

    def __init__(self) -> None:
        self.ledger = SmSlotLedger({GPU: h100()})
        self.answers: list[Exception] = []
        self.asked = 0

        def remote(gpu: str, engine_id: str, slots: int) -> SmLease:
            self.asked += 1
            if self.answers:
                raise self.answers.pop(0)
            try:
                return self.ledger.lease_slots(gpu, engine_id, slots)
            except KeyError:
                raise UnknownGpu(gpu) from None

        self.lease_sm_slots = SimpleNamespace(remote=remote)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    found = Actor()

    def get_actor(name: str, namespace: str) -> Actor:
        assert (name, namespace) == ("the node's", "serve")
        return found

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(leasing, "_RETRY_S", 0.0)
    return found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The device that the worker has, and green contexts that another process has found."""
    found = Driver()
    monkeypatch.setattr(green_contexts, "load_driver", lambda: found)
    monkeypatch.setattr(green_contexts, "why_not", lambda: "")
    properties = SimpleNamespace(
        uuid=GPU.removeprefix("GPU-"), multi_processor_count=132, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


class Runner:
    """The second of vLLM's model runners, as far as it remembers its stream."""

    model = torch.nn.Linear(1, 1)

    def get_model(self) -> torch.nn.Module:
        return self.model

    @functools.cached_property
    def main_stream(self) -> Any:
        return torch.cuda.current_stream(torch.device("cuda:0"))


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch, current: Callable[[], Stream]) -> list[Stream]:
    """VLLM's part of the worker: on which stream the model was loaded."""
    loaded: list[Stream] = []

    def begin(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.vllm_config = vllm_config
        self.device = torch.device("cuda:0")
        self.model_runner = Runner()

    def load_model(self: Any, *, load_dummy_weights: bool = False) -> None:
        loaded.append(current())

    monkeypatch.setattr(Worker, "__init__", begin)
    monkeypatch.setattr(Worker, "load_model", load_model)
    return loaded


def a_worker(engine_id: str = "decoder", slots: int = 7) -> SlotWorker:
    extra = {"lmcache.mp.port": 7610, **tell_worker(slots, engine_id, "the node's")}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    return SlotWorker(config, local_rank=0)


def test_the_model_is_loaded_on_the_leased_sms(
    actor: Actor,
    driver: Driver,
    vllms: list[Stream],
    unpatched: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Under MPS a percentage would leave green contexts fewer SMs than the ledger counts.
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30")
    neighbour = actor.ledger.lease_slots(GPU, "prefiller", 3)
    worker = a_worker()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
    worker.load_model()
    (stream,) = vllms
    assert driver.streams[stream.handle] == set(range(40, 132))
    lease = lease_of(worker.conserve_sm_lease())
    assert actor.ledger.leases() == [neighbour, lease]
    assert (lease.owner, lease.sms) == ("decoder", 92)
    # Graphs are captured there, and decoding and prefill share nothing but these.
    assert parallel_state.GraphCaptureContext("any").stream is stream
    assert slot_pairs().sizes_sms[-1] == 92


def test_the_runner_goes_where_the_border_has_moved_its_steps(
    actor: Actor,
    driver: Driver,
    vllms: list[Stream],
    current: Callable[[], Stream],
    unpatched: None,
) -> None:
    # It is remembered by this name, in this way.
    assert isinstance(vars(GPUModelRunner)["main_stream"], functools.cached_property)
    worker = a_worker()
    before = worker.model_runner.main_stream
    worker.load_model()
    assert worker.model_runner.main_stream is vllms[0] is not before
    bound = slot_pairs().bind(40)
    assert worker.model_runner.main_stream is bound.decode_stream is current()
    # Seven tenths, from the first unit on: nobody else is there.
    assert driver.streams[bound.decode_stream.handle] == set(range(40))
    assert driver.streams[bound.lane_stream.handle] == set(range(40, 88))


def test_a_predecessors_sms_are_waited_for(
    actor: Actor, driver: Driver, vllms: list[Stream], unpatched: None
) -> None:
    actor.answers = [NoFreeSms("the dead one's"), ValueError("no actor"), NoFreeSms("still")]
    a_worker().load_model()
    assert actor.asked == 4
    assert len(vllms) == 1


def _leased(actor: Actor, driver: Driver) -> None:
    actor.ledger.lease_slots(GPU, "other", 7)


def _split_otherwise(actor: Actor, driver: Driver) -> None:
    driver.hidden = 1


@pytest.mark.parametrize(
    ("spoil", "said", "asked"),
    [
        (_leased, "GPU-0.*: 4 of 10 slots are not free in one piece: other has 0 to 10", 1),
        # Before anything is leased.
        (_split_otherwise, "the driver splits 132 SMs into 15 of 8", 0),
    ],
)
def test_why_an_engine_does_not_start_is_one_line(
    actor: Actor, driver: Driver, vllms: list[Stream], unpatched: None,
    monkeypatch: pytest.MonkeyPatch, spoil: Any, said: str, asked: int,
) -> None:  # fmt: skip
    if spoil is _leased:
        monkeypatch.setattr(leasing, "_TIMEOUT_S", -1.0)
    spoil(actor, driver)
    with pytest.raises(RuntimeError, match=f"^sm_slots: {said}") as refused:
        a_worker(slots=4).load_model()
    assert "\n" not in str(refused.value)
    assert (actor.asked, vllms) == (asked, [])


def test_kernels_whose_blocks_wait_for_each_other_are_refused(
    actor: Actor, driver: Driver, vllms: list[Stream], unpatched: None
) -> None:
    worker = a_worker()
    worker.model_runner.model = torch.nn.Linear(1, 1)
    worker.model_runner.model.kernel = object.__new__(MarlinLinearKernel)
    with pytest.raises(RuntimeError, match=r"^sm_slots: MarlinLinearKernel .*; leave sm_slots out"):
        worker.load_model()


def test_with_neither_green_contexts_nor_mps_it_does_not_start(
    actor: Actor, vllms: list[Stream], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(green_contexts, "why_not", lambda: "an old driver")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"^sm_slots: no green contexts \(an old driver\)"):
        a_worker()


def test_without_green_contexts_the_process_is_held_by_mps(
    actor: Actor,
    driver: Driver,
    vllms: list[Stream],
    current: Callable[[], Stream],
    unpatched: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(green_contexts, "why_not", lambda: "an old driver")
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    plain, capture = current(), parallel_state.GraphCaptureContext
    worker = a_worker()
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "70"
    worker.load_model()
    # It counts in the ledger; its stream and captures are vLLM's.
    assert actor.ledger.leases()[0].owner == "decoder"
    assert vllms == [plain]
    assert parallel_state.GraphCaptureContext is capture
    assert slot_pairs().sizes_sms == ()
    assert driver.streams == {}
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


def test_vllm_takes_the_worker_by_its_name() -> None:
    """It mixes the extension into the class, which must not have anything of it already."""
    worker = resolve_obj_by_qualname(SLOT_WORKER)
    extension = resolve_obj_by_qualname(EXTENSION)
    assert issubclass(worker, Worker)
    assert hasattr(worker, "conserve_sm_lease")
    own = [name for name in dir(extension) if not name.startswith("__")]
    assert [name for name in own if hasattr(worker, name)] == []


def test_nothing_looks_at_the_gpu_before_the_worker_has_its_share() -> None:
    """Loading LMCache does."""
    module = SLOT_WORKER.rpartition(".")[0]
    shown = f"import sys, {module}; print([name for name in sys.modules if name == 'lmcache'])"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
