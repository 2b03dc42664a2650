"""The machine without our engines: what it has, CUDA IPC, `conserve doctor`, pinning memory."""

import subprocess
import sys

import pytest

from conserve_cli.doctor.findings import gibibytes
from conserve_cli.doctor.machine import lockable_bytes
from conserve_cli.doctor.software import ask_torch, try_ipc
from conserve_inside.sm_slots.means import mps_runs
from hetero.container import host_memory, usable_cpus
from tests.acceptance.gpu.card import card, printed_by, used_bytes
from tests.checkout import ROOT
from tests.engines.streams import Put

_ASK_CUDA = """
import json, torch
found, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
print(json.dumps([str(found.uuid), total, free]))
"""
# In pieces, as LMCache's allocator does it.
_PIN = """
import sys, time, torch
size, piece = int(sys.argv[1]) << 30, 1 << 26
torch.zeros(1, device="cuda")
started_s = time.perf_counter()
memory = torch.empty(size, dtype=torch.uint8)
for at in range(0, size, piece):
    done = torch.cuda.cudart().cudaHostRegister(memory.data_ptr() + at, piece, 0)
    torch.cuda.check_error(int(done))
print(time.perf_counter() - started_s)
"""


@pytest.mark.step("facts")
def test_nvml_and_cuda_see_a_gpu(machine_alone: None, figure: Put) -> None:
    here = card()
    uuid, total, free = printed_by("-c", _ASK_CUDA)
    figure("UUID, to NVML and to CUDA", f"{here.uuid}, {uuid}")
    figure("memory, to NVML", f"{gibibytes(here.memory_bytes)}, {gibibytes(used_bytes())} taken")
    figure("memory, to CUDA", f"{gibibytes(total)}, {gibibytes(free)} free")
    figure("SMs", here.sm_count or "unknown")
    figure("MPS control daemon", "runs" if mps_runs() else "does not run")
    figure("memory that may be locked", lockable_bytes() or "unlimited")
    figure("CPUs", usable_cpus())


@pytest.mark.step("CUDA IPC")
def test_a_process_reads_anothers_memory(machine_alone: None) -> None:
    """LMCache's own operations, which copy in the order of the GPU's work, are there."""
    assert try_ipc() == ""
    assert ask_torch().cuda_ops == ""


@pytest.mark.step("doctor")
def test_the_doctor_finds_nothing_wrong(machine_alone: None, figure: Put) -> None:
    command = [sys.executable, "-m", "conserve_cli.main", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    for line in done.stdout.splitlines():
        level, _, said = line.partition(" ")
        figure(level, said.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.step("vLLM alone")
def test_vllm_alone_answers(alone: dict[str, str], machine_alone: None) -> None:
    assert all(alone.values())


@pytest.mark.step("pinned memory")
@pytest.mark.parametrize("size_gib", [20, 64])
def test_pinning_memory(machine_alone: None, figure: Put, size_gib: int) -> None:
    if host_memory().available_bytes < 1.25 * (size_gib << 30):
        pytest.skip(f"less than {1.25 * size_gib:g} GiB of host memory are free")
    figure(f"pinning {size_gib} GiB", printed_by("-c", _PIN, str(size_gib)), "s")
