"""Where this checkout is, and where recorded sessions and conversations lie beside it or in it."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _data() -> Path:
    if given := os.environ.get("CONSERVE_TEST_DATA"):
        return Path(given)
    beside, inside = (folder / "shared" / "data" for folder in (ROOT.parent, ROOT))
    return inside if inside.is_dir() and not beside.is_dir() else beside


# Tests that read it are skipped where there is none.
DATA = _data()


def pins(name: str) -> list[str]:
    """Return the pins of a file of requirements, such as `ray==2.60.0`, without the hashes."""
    return re.findall(r"^[\w.-]+===?\S+", (ROOT / name).read_text(), re.MULTILINE)
