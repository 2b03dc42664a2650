"""Keeps grammars off the event loop of an engine's HTTP server.

vLLM 0.32 validates a schema by making a grammar of it, in the coroutine of its request. That has no
bound: a ``pattern`` with a count of 9,999 stops all streams for six seconds, and a schema of 32 KiB
for minutes. `deployments.engine.grammars` has it compiled elsewhere before, so that nothing is left
to validate here.
"""

import json
from collections.abc import Callable
from typing import Any

from deployments.upstream.patch import Patch


def name_of(schema: Any) -> str:
    """Return what a schema is known by, however it was written."""
    return json.dumps(schema, sort_keys=True)


def trust_judged(unfit: Callable[[str], bool]) -> None:
    """Have this process take any grammar for valid; ``unfit`` tells schemas that xgrammar refuses.

    For these vLLM then takes another compiler, as it does by itself.
    """
    from vllm.v1.structured_output import backend_xgrammar

    backend_xgrammar.xgr = _Judged(backend_xgrammar.xgr, unfit)


class _Judged:
    """The module ``xgrammar``, but for its class ``Grammar``."""

    def __init__(self, module: Any, unfit: Callable[[str], bool]) -> None:
        self._module = module
        self._unfit = unfit
        self.Grammar = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def from_json_schema(self, schema: Any) -> None:
        if self._unfit(name_of(schema)):
            raise ValueError("another compiler takes this schema")

    def _passed(self, *given: Any) -> None:
        pass

    from_regex = from_ebnf = from_lark = from_structural_tag = _passed


PATCH = Patch(
    name="unbounded_grammars",
    seams=("vllm.v1.structured_output.backend_xgrammar:xgr",),
    why="one request's schema holds up all streams of its engine, for as long as it takes",
    upstream="vllm#54003, vllm#17313 (compile grammars off the event loop, within bounds)",
    process="server",
)
