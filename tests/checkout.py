"""Where this checkout is, and where recorded sessions and conversations lie beside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CONSERVE_TEST_DATA", ROOT.parent / "shared" / "data"))
