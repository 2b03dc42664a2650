"""Replicas that start at a time load their code, whatever the others register meanwhile."""

import subprocess
import sys

from tests.checkout import ROOT

# As where another replica registers connectors between Ray's look and its call.
_OTHERS_REGISTER = """
from ray.llm._internal.serve.utils.registry import ComponentRegistry

registers, left = ComponentRegistry.register, 4

def register(self, name, value):
    global left
    registers(self, name, value)
    if left:
        left -= 1
        registers(self, name, value)

ComponentRegistry.register = register
from deployments.engine.replica import EngineServer
assert not left
print(EngineServer.__name__)
"""


def test_connectors_that_others_register_are_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _OTHERS_REGISTER],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split()[-1:] == ["EngineServer"], done.stderr
