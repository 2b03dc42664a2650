"""Shows what slots do on a GPU: ``python -m tests.acceptance.gpu.on_slots CHECK``, without engines.

Each check is a process of its own, as engines are, and prints one line of JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from conserve_inside.sm_slots.green_contexts import GreenContexts
from conserve_inside.sm_slots.pairs import SlotPairs
from hetero.sm_units import SmSlots, sides, sm_granularity

# Many for each SM, each of one warp: every SM that may gets some.
_PROGRAMS = 4096
_REBINDINGS = 2_000


@triton.jit
def _where(out, zeros, spin: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program writes the SM that it runs on, after a while."""
    at = tl.program_id(0)
    passed = tl.zeros((1,), dtype=tl.int32)
    for _ in range(spin):
        passed += tl.load(zeros + tl.arange(0, 1), volatile=True)
    sm = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [passed], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + at + tl.arange(0, 1), sm)


def slots_here() -> SmSlots:
    """Return the SM slots of the first device."""
    found = torch.cuda.get_device_properties(0)
    return SmSlots(
        found.multi_processor_count, sm_granularity((int(found.major), int(found.minor)))
    )


class Device:
    """The first device, its contexts, and who runs where."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # The primary context, which green ones share.
        self.slots = slots_here()
        self.split = self.slots.split
        self.all = range(self.split.units)
        self.contexts = GreenContexts(self.slots, 0)
        self._zeros = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.out = torch.full((_PROGRAMS,), -1, dtype=torch.int32, device="cuda")

    def stream(self, units: range) -> torch.cuda.ExternalStream:
        return torch.cuda.ExternalStream(self.contexts.stream(units))

    def pairs(self) -> SlotPairs:
        wrap, make_current = torch.cuda.ExternalStream, torch.cuda.set_stream
        return SlotPairs(self.contexts, self.split, self.all, wrap, make_current)

    def launch(self) -> None:
        _where[(_PROGRAMS,)](self.out, self._zeros, 200, num_warps=1)

    def sms(self, stream: torch.cuda.Stream) -> set[int]:
        """The SMs that a kernel of this stream runs on."""
        self.out.fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.launch()
        torch.cuda.synchronize()
        return set(self.out.tolist())


def check_sides() -> dict[str, Any]:
    """Both sides of each size, and how many SMs they had, and shared."""
    device = Device()
    rows = []
    for one in sides(device.split, device.all):
        decode = device.sms(device.stream(one.decode))
        prefill = device.sms(device.stream(one.prefill)) if one.prefill else set()
        rows.append(
            {
                "decode": [one.decode_sms, len(decode)],
                "prefill": [device.contexts.sms(one.prefill), len(prefill)],
                "shared": len(decode & prefill),
            }
        )
    return {"sms": device.slots.sm_count, "rows": rows}


def check_lease(start: str, stop: str) -> dict[str, Any]:
    """The SMs of these units, as this process finds them."""
    device = Device()
    units = range(int(start), int(stop))
    return {
        "leased": device.contexts.sms(units),
        "ran_on": sorted(device.sms(device.stream(units))),
    }


def check_graph() -> dict[str, Any]:
    """How many SMs a graph ran on beside those it was captured on, by where it was launched."""
    device = Device()
    border = device.split.units // 3
    captured, other = device.stream(range(border)), device.stream(range(border, device.split.units))
    allowed = device.sms(captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=captured):
        device.launch()
    outside = {}
    for name, stream in (("own", captured), ("other", other), ("plain", torch.cuda.Stream())):
        device.out.fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        outside[name] = len(set(device.out.tolist()) - allowed)
    return {"allowed": len(allowed), "outside": outside}


def check_rebinding() -> dict[str, Any]:
    """What moving the border costs the thread that does it, and what contexts cost in memory."""
    device = Device()
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info()[0]
    started_s = time.perf_counter()
    pairs = device.pairs()
    torch.cuda.synchronize()
    made_s = time.perf_counter() - started_s
    took_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    for size in pairs.sizes_sms:
        pairs.bind(size)
    took_us = []
    for number in range(_REBINDINGS):
        size = pairs.sizes_sms[number % len(pairs.sizes_sms)]
        started_s = time.perf_counter()
        pairs.bind(size)
        took_us.append((time.perf_counter() - started_s) * 1e6)
    torch.cuda.synchronize()
    took_us.sort()
    return {
        "contexts_mib": took_bytes / 2**20,
        "contexts_s": made_s,
        "median_us": statistics.median(took_us),
        "p99_us": took_us[int(len(took_us) * 0.99)],
    }


def check_beside() -> dict[str, Any]:
    """Milliseconds of a decode step's GEMMs beside a prefill's: on plain streams, and on slots."""
    device = Device()
    pairs = device.pairs()
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    prompt = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    batch = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(28):
            batch @ weights

    def prefill() -> None:
        prompt @ weights

    half = next(size for size in pairs.sizes_sms if 2 * size >= device.slots.sm_count)
    bound = pairs.bind(half)
    plain = (torch.cuda.Stream(), torch.cuda.Stream(priority=-1))
    arrangements = {
        "alone": (None, plain[0]),
        "plain streams": (plain[0], torch.cuda.Stream()),
        "a stream of priority": (plain[0], plain[1]),
        "slots": (bound.lane_stream, bound.decode_stream),
    }
    rows = {}
    for name, (beside, stream) in arrangements.items():
        torch.cuda.synchronize()
        if beside is not None:
            with torch.cuda.stream(beside):
                for _ in range(400):
                    prefill()
        rows[name] = _times_ms(step, stream, 30)
        torch.cuda.synchronize()
    return {
        name: {"median": statistics.median(times), "p95": sorted(times)[int(len(times) * 0.95)]}
        for name, times in rows.items()
    }


def _times_ms(work: Callable[[], Any], stream: torch.cuda.Stream, times: int) -> list[float]:
    found = []
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        for _ in range(times):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            work()
            ended.record()
            ended.synchronize()
            found.append(begun.elapsed_time(ended))
    return found


def main() -> None:
    """Run the check that is named."""
    name, *arguments = sys.argv[1:]
    sys.stdout.write(json.dumps(globals()[f"check_{name}"](*arguments)) + "\n")


if __name__ == "__main__":
    main()
