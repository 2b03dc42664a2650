"""Loads an engine replica's code; Serve imports `EngineServer` from here, by name.

vLLM, PyTorch and Ray Serve LLM make a million objects while they are imported, none of which goes
away. Python's garbage collector looks at them again and again, which takes a fifth of the import's
seven seconds; so it waits until they are loaded, and does not look at them afterwards either.
"""

import gc

from deployments.upstream import connector_race
from deployments.upstream.patch import require
from deployments.upstream.seams import require_seams

gc.disable()
try:
    require(connector_race.PATCH)
    connector_race.keep_what_is_registered()
    require_seams("ray_llm")
    from deployments.engine.engine import EngineServer
finally:
    gc.enable()
gc.freeze()

__all__ = ["EngineServer"]
