"""Python runs this as it starts, where a test has put this folder on PYTHONPATH."""

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])

sys.path.insert(0, _ROOT)
try:
    if "CONSERVE_STANDIN_NVML" in os.environ:
        from tests.nvml import library

        library.load_here()
    if "CONSERVE_TEST_CPU" in os.environ:
        from tests import machines

        machines.view_cpu_here(os.environ["CONSERVE_TEST_CPU"])
    if "CONSERVE_TURN_PATH" in os.environ:
        from tests.engines.turn_path import recorder

        recorder.watch_here()
finally:
    sys.path.remove(_ROOT)
