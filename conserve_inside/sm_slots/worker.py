"""vLLM's GPU worker, on the SMs that its engine has leased (``worker_cls``).

Before the model is loaded, a stream that keeps to the leased SMs becomes the current one of the
thread that runs all of the engine's steps. So whatever vLLM launches or captures there keeps to
them. If that fails, the engine does not start.

Used of vLLM 0.32: ``Worker.load_model`` comes after ``init_device`` and before any kernel of the
model, in the thread of ``execute_model``. ``current_stream()`` of ``utils/torch_utils`` is what
``torch.cuda.set_stream`` was given. ``main_stream`` of ``v1/worker/gpu/model_runner`` is a cached
property. Other streams of vLLM's only copy, but for those of ``SLOT_ENVIRONMENT``, of LoRA
adapters, of dual batch overlap and of some models.
"""

import logging
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from conserve_inside.lane.worker import LaneWorking
from conserve_inside.scratch import locking_kernel
from conserve_inside.sm_slots import pairs
from conserve_inside.sm_slots.green_contexts import SmsUnavailable
from conserve_inside.sm_slots.lease import lease_slots, said_of, told
from conserve_inside.sm_slots.means import means_of, mps_runs, prepare
from deployments.engine.gpu_worker import GpuWorker
from deployments.upstream import captured_elsewhere
from deployments.upstream.patch import require
from deployments.upstream.seams import require_seams
from hetero.nvml import UnknownGpu
from hetero.sm_slots import NoFreeSms, SmLease
from hetero.sm_units import SmSlots, sm_granularity

logger = logging.getLogger("vllm.conserve")


class SlotWorker(Worker):  # type: ignore[misc]  # vLLM's classes are taken as untyped.
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._told = told(vllm_config)
        self._lease: SmLease | None = None
        try:
            # Before anything looks at the GPU.
            self._why_no_contexts = prepare(self._told["slots"])
        except SmsUnavailable as error:
            raise RuntimeError(f"sm_slots: {error}") from None
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        try:
            self._take_slots()
        except (SmsUnavailable, NoFreeSms, UnknownGpu) as error:
            raise RuntimeError(f"sm_slots: {error}") from None
        super().load_model(**kwargs)
        if (kernel := locking_kernel(self.model_runner.get_model())) is not None:
            raise RuntimeError(
                f"sm_slots: {kernel} starts as many blocks as the GPU has SMs, which wait for each "
                "other, and some would never run; leave sm_slots out"
            )

    def conserve_sm_lease(self) -> list[Any]:
        assert self._lease is not None
        return said_of(self._lease)

    def _take_slots(self) -> None:
        device = torch.device(self.device)
        properties = torch.cuda.get_device_properties(device)
        sm_count = int(properties.multi_processor_count)
        slots = SmSlots(sm_count, sm_granularity((properties.major, properties.minor)))
        named = GpuWorker()
        named.device = device
        gpu = named.conserve_gpu_uuid()
        # This checks that the driver splits as the ledger does. After a lease, a failure would keep
        # the SMs from other engines until this one is missed.
        means = means_of(slots, device.index, self._why_no_contexts)
        lease = self._lease = lease_slots(gpu, **self._told)
        units = lease.units
        logger.info(
            "on %d of %d SMs of %s, units %d to %d, by %s", lease.sms, sm_count, gpu, units.start,
            units.stop - 1, means.name,
        )  # fmt: skip
        if not mps_runs():
            logger.warning(
                "no MPS control daemon here: engines on one GPU take turns, each on its own SMs; "
                "start `nvidia-cuda-mps-control -d` to have them run beside each other"
            )

        def wrap(handle: int) -> Any:
            return torch.cuda.ExternalStream(handle, device=device)

        handle = means.stream(units)
        if handle is not None:
            stream = wrap(handle)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._make_current(stream)
            require_seams("sm_slots")
            require(captured_elsewhere.PATCH)
            captured_elsewhere.capture_where_it_runs()
        pairs.provide(lambda: pairs.SlotPairs(means, slots.split, units, wrap, self._make_current))

    def _make_current(self, stream: Any) -> None:
        # vLLM has replaced this function, to know the current stream.
        torch.cuda.set_stream(stream)
        # vLLM's second runner remembers its first stream, and goes back to it.
        self.model_runner.__dict__.pop("main_stream", None)


class SlotLaneWorker(LaneWorking, SlotWorker):
    """Overlaps steps and the lane's chunks, each on its side of the engine's SMs."""

    def _capture_for_each_border(self) -> pairs.GraphSets | None:
        graphs = pairs.GraphSets(self.model_runner, pairs.slot_pairs())
        graphs.capture()
        return graphs
