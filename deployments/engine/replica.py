"""Loads an engine replica's code; Serve imports `EngineServer` from here, by name.

vLLM, PyTorch and Ray Serve LLM make a million objects while they are imported, none of which goes
away. Python's garbage collector looks at them again and again, which takes a fifth of the import's
seven seconds; so it waits until they are loaded, and does not look at them afterwards either.

Ray Serve LLM registers four KV connectors in the cluster while it is imported, if they are not
there. Where several replicas start at a time, another one may register one between its look and its
call, and Ray 2.60 takes that for an error. The next import finds it registered.
"""

import gc
import importlib

_REGISTERED = "is already registered"
_CONNECTORS = 4


def _load() -> None:
    for _ in range(_CONNECTORS):
        try:
            importlib.import_module("deployments.engine.engine")
        except ValueError as error:
            if _REGISTERED not in str(error):
                raise
        else:
            return


gc.disable()
try:
    _load()
    from deployments.engine.engine import EngineServer
finally:
    gc.enable()
gc.freeze()

__all__ = ["EngineServer"]
