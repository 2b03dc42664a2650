"""`make test-gpu`: the order of its steps, what is not run, and the page, without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

from tests.acceptance.gpu.steps import NAMES, STEPS
from tests.acceptance.gpu.test_start import planned
from tests.checkout import ROOT
from tests.engines.applications import GPU, GPU_LANE, GPU_ONE, GPU_SLOTS, GPU_TWO
from tests.engines.real_shape import make_real_shape
from tests.nvml.standin import Machine

FOLDER = ROOT / "tests/acceptance/gpu"


def test_steps_come_after_those_that_they_need_and_each_has_tests() -> None:
    for number, step in enumerate(STEPS):
        assert set(step.needs) <= set(NAMES[:number])
    text = "".join(file.read_text() for file in FOLDER.glob("test_*"))
    assert [name for name in NAMES if f'"{name}"' not in text] == []


CONFTEST = """
from pathlib import Path
from tests.acceptance.gpu.plugin import GpuSteps

def pytest_configure(config):
    config.pluginmanager.register(GpuSteps("", Path("page.md")), "gpu-steps")
"""
TESTS = """
import pytest

@pytest.mark.step("one engine")
def test_engine(): raise AssertionError("its need has failed")

@pytest.fixture(scope="module")
def broken(): raise OSError("no engine")

@pytest.mark.step("offload")
@pytest.mark.parametrize("number", [1, 2])
def test_offload(broken, number): pass

@pytest.mark.step("CUDA IPC")
@pytest.mark.parametrize("is_right", [True, False])
def test_ipc(is_right): assert is_right, "no IPC"

@pytest.mark.step("pinned memory")
def test_pinned(): pytest.skip("too little memory")

@pytest.mark.step("facts")
def test_facts(figure): figure("CPUs", 16)
"""


def test_pytest_runs_the_steps_and_writes_the_page(tmp_path: Path) -> None:
    """On a stand-in GPU, with tests that are known to fail."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = _run(tmp_path, Machine(tmp_path / "gpus", gpus=1), "test_it.py")
    assert "conserve: what was seen is in page.md" in done.stdout, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert re.match(r"### \d{4}-\d\d-\d\d: NVIDIA A40\n", page)
    assert "1 x NVIDIA A40, driver 550.54.15 (CUDA up to 12.4), Python 3." in page
    rows = re.findall(r"^\| ([^|]+) \| [^|]* \| ([^|]*) \| \d+ \|$", page, re.M)
    asked = ("facts", "CUDA IPC", "one engine", "offload", "pinned memory")
    assert {name: result for name, result in rows if name in asked} == {
        "facts": "**passed**",
        "CUDA IPC": "**failed**: `test_ipc[False]`: AssertionError: no IPC",
        "one engine": "not run: needs CUDA IPC, which failed",
        "offload": "**failed**: `test_offload[1]`: OSError: no engine; "
        "not run: its set-up failed before",
        "pinned memory": "not run: too little memory",
    }
    assert page.endswith("| facts | CPUs | 16 |\n")


def test_without_a_gpu_all_is_skipped_for_one_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = _run(ROOT, Machine(tmp_path / "gpus", gpus=0), str(FOLDER), f"--gpu-page={page}")
    (reason,) = re.findall(r"^SKIPPED .*", done.stdout, re.M)
    assert reason.endswith(": no NVIDIA GPU answers here")
    assert re.search(r"^=+ \d+ skipped", done.stdout, re.M), done.stdout
    assert not page.exists()


def _run(folder: Path, machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = machine.environment()
    environment["PYTHONPATH"] += f":{ROOT}"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_applications_on_a_gpu_have_their_engines(machine: Machine, tmp_path: Path) -> None:
    """By the plan for an H100; a layer of their model has 4 KiB of KV a token."""
    make_real_shape(tmp_path / "model", layers=1)
    assert (tmp_path / "model" / "chat_template.jinja").exists()
    machine.keep_gpus(1)
    machine.gpus[0].be_an_h100()
    for application in (GPU_ONE, GPU, GPU_TWO, GPU_LANE, GPU_SLOTS):
        plan = planned(application, str(tmp_path / "model"))
        counts = {one.role: one.replicas for one in plan.engines}
        assert counts.get("prefiller", 0) == application.prefillers
        assert counts["decoder"] == application.decoders
        assert {one.needs.kv_token_bytes for one in plan.engines if one.needs} == {4096}
        assert all(one.budget_bytes and one.kv_tokens for one in plan.engines)
        assert sum(one.replicas * (one.budget_bytes or 0) for one in plan.engines) <= 80 << 30
