"""The table of patches, and what becomes of another project that is not as they expect."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.upstream import patch as records
from deployments.upstream import patches as table
from deployments.upstream.patch import Patch, PatchError, missing, require
from deployments.upstream.patches import FILES, apply_patches, patches
from deployments.upstream.seams import seams
from tests.checkout import ROOT

FOLDER = ROOT / "deployments" / "upstream"
NOT_PATCHES = {"__init__", "patch", "patches", "seams", "unnamed_memory"}


def test_each_file_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == NOT_PATCHES | set(FILES)
    assert len({one.name for one in patches()}) == len(patches()) == len(FILES) + len(seams())


@pytest.mark.parametrize("name", FILES)
def test_each_file_has_its_patch_and_two_tests(name: str) -> None:
    patch: Patch = importlib.import_module(f"deployments.upstream.{name}").PATCH
    assert patch.name == name
    tests = ROOT / "tests" / "unit" / "deployments" / "upstream" / f"test_{name}.py"
    assert tests.read_text().count("def test_") >= 2


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.name)
def test_each_record_says_why_and_until_when(patch: Patch) -> None:
    assert patch.why
    assert "#" in patch.upstream or patch.upstream.startswith("not reported: ")
    assert all(seam.count(":") == 1 and "(" not in seam for seam in patch.seams or ("",))


@pytest.mark.parametrize(
    "patch", [one for one in patches() if one.device != "cuda"], ids=lambda patch: patch.name
)
def test_what_is_installed_is_as_each_patch_expects(patch: Patch) -> None:
    require(patch)


def test_the_table_loads_nothing_of_what_it_changes() -> None:
    loads = "import sys; from deployments.upstream import patches as table; table.patches()"
    command = [sys.executable, "-c", f"{loads}; print(*sys.modules)"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stdout.split())
    assert "deployments.upstream.patches" in loaded, run.stderr
    assert not loaded & {"vllm", "ray", "lmcache", "torch", "uvicorn"}


def test_another_release_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "version_of", lambda package: "0.99.1")
    monkeypatch.delenv(records.ANY_VERSION, raising=False)
    with pytest.raises(PatchError) as refused:
        require(seams()["scheduler"])
    said = str(refused.value)
    assert said.startswith("patch scheduler is for vllm ==0.32.0, and vllm 0.99.1 is another")
    assert said.endswith("or set engine_scheduler=vllm")
    assert "\n" not in said


def test_an_altered_copy_is_refused_by_the_patch_that_it_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "altered.py").write_text("class Scheduler:\n    def _free(self, request): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(records, "version_of", lambda package: "1.0")
    monkeypatch.setitem(records.VERSIONS, "altered", "==1.*")
    broken = Patch(
        name="freeing",
        seams=("altered:Scheduler._free_blocks",),
        why="blocks stay", upstream="#1", process="engine",
    )  # fmt: skip
    file = SimpleNamespace(PATCH=broken, apply=lambda: None)
    monkeypatch.setattr(table, "files", lambda: (file,))
    with pytest.raises(PatchError, match=r"^patch freeing .* altered:Scheduler._free_blocks \("):
        apply_patches("engine")


def test_what_is_missing_is_told() -> None:
    assert missing("shutil:copyfile") is missing("threading:Thread._target") is None
    for seam in ("shutil:copy_file", "shutils:copyfile", "threading:Thread._aim"):
        assert str(missing(seam)).startswith(f"{seam} (")
