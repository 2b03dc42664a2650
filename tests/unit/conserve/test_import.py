"""`import conserve` is light."""

import subprocess
import sys
from pathlib import Path

import pytest

import conserve

ROOT = Path(conserve.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)

# Run where any use of the network is an error.
PROBE = """
import importlib, sys

def forbid(event, arguments):
    if event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
        raise RuntimeError(f"network use: {event} {arguments}")

sys.addaudithook(forbid)
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = {"ray", "vllm", "torch", "lmcache", "transformers", "deployments"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


def test_no_module_loads_an_engine_or_uses_the_network() -> None:
    assert {"conserve", "conserve.conversations"} <= set(MODULES)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *MODULES],
        capture_output=True, text=True, timeout=60, cwd=ROOT.parent,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_unknown_attributes_are_refused_as_usual() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        conserve.nonsense  # noqa: B018
    assert not hasattr(conserve, "also_nonsense")


def test_a_folder_of_the_same_name_is_not_taken_for_the_package(tmp_path: Path) -> None:
    """Ray's workers have the home on their path, which may have a checkout called conserve."""
    (tmp_path / "conserve").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import conserve; conserve.__version__"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
