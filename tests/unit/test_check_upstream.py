"""`make check-upstream`: what of a seam counts as changed, and where it is looked for."""

from pathlib import Path

import pytest

from scripts.check_upstream import Source, released, verdicts

HERE = {
    "far/__init__.py": "from far.engine import Engine\nfrom . import tools\n",
    "far/engine.py": '''
from far import base

class Engine(base.Common["x"]):
    """It runs."""

    def __init__(self, size: int) -> None:
        self.size = size

    def step(self, request: str) -> None:
        """Run one step."""
        self.size += 1
''',
    "far/base.py": "class Common:\n    def stop(self): return 1\n",
    "far/tools.py": """
from multiprocessing import shared_memory
WAITS_S = 5
try:
    import fast
except ImportError:
    def tool(x): return x
""",
}
SEAMS = (
    "far:Engine.step",
    "far.engine:Engine.stop",
    "far.engine:Engine.size",
    "far:tools.tool",
    "far.tools:WAITS_S",
    "far.tools:shared_memory.SharedMemory",
)


def judged(changes: dict[str, tuple[str, str]]) -> dict[str, str]:
    """The verdict of each seam, by its name, where files have other text."""
    there = dict(HERE)
    for path, (old, new) in changes.items():
        assert old in there[path]
        there[path] = there[path].replace(old, new)
    found = verdicts(Source(HERE.get), Source(there.get), SEAMS)
    return {seam.partition(":")[2]: verdict for seam, verdict, _ in found}


NAMES = [seam.partition(":")[2] for seam in SEAMS]
ALL_SAME = dict.fromkeys(NAMES, "same")


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, {}),
        ({"far/engine.py": ("Run one step.", "Run it.")}, {}),
        ({"far/engine.py": ("request: str) -> None:", "request):  # as ever")}, {}),
        ({"far/engine.py": ("self.size += 1", "self.size += 2")},
         {"Engine.step": "changed", "Engine.size": "changed"}),
        ({"far/engine.py": ("def step", "def one_step")}, {"Engine.step": "gone"}),
        ({"far/engine.py": ('base.Common["x"]', "object")}, {"Engine.stop": "gone"}),
        ({"far/base.py": ("return 1", "return 2")}, {"Engine.stop": "changed"}),
        ({"far/tools.py": ("= 5", "= 6")}, {"WAITS_S": "changed"}),
        ({"far/__init__.py": ("from . import tools\n", "")}, {"tools.tool": "gone"}),
    ],
)  # fmt: skip
def test_code_counts_and_what_is_said_of_it_does_not(
    changes: dict[str, tuple[str, str]], others: dict[str, str]
) -> None:
    assert judged(changes) == {**ALL_SAME, **others}


def test_a_change_is_shown() -> None:
    there = {**HERE, "far/base.py": HERE["far/base.py"].replace("1", "2")}
    seams = ("far.engine:Engine.stop",)
    ((_, _, difference),) = verdicts(Source(HERE.get), Source(there.get), seams)
    assert "-    return 1\n+    return 2" in difference


def test_a_wheel_that_is_there_is_read_without_unpacking(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "far-2.0-py3-none-any.whl", "w") as wheel:
        for path, text in HERE.items():
            wheel.writestr(path, text)
    found = released("far", "2.0", tmp_path).seam("far:Engine.step")
    assert found is not None
    assert "self.size += 1" in found
