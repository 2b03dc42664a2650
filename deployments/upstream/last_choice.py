"""Has vLLM tell what a request found in caches, whichever of its choices comes last.

One of several choices loads the prompt's KV and has its images encoded; the others find both. vLLM
0.32 passes on what the last one says, and nothing if another one's tokens follow.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from conserve import wire
from deployments.upstream.patch import Patch, of

_KV, _EC = "kv_transfer_params", "ec_transfer_params"


@dataclass(slots=True)
class _Told:
    """The parameters that the choices of one request have come with so far."""

    kv: dict[str, Any] | None = None
    encoded: wire.Encoded = wire.NOTHING_ENCODED


def apply() -> None:
    from vllm.v1.engine.output_processor import RequestState

    make = RequestState.make_request_output
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(state: Any, *given: Any, **named: Any) -> Any:
        if state.parent_req is None:
            return make(state, *given, **named)
        bound = signature.bind(state, *given, **named)
        bound.apply_defaults()
        told = bound.arguments
        told[_KV], told[_EC] = _all_told(state.parent_req, told[_KV], told[_EC])
        return make(*bound.args, **bound.kwargs)

    RequestState.make_request_output = made


def _all_told(parent: Any, kv: Any, ec: Any) -> tuple[Any, Any]:
    told: _Told = vars(parent).setdefault("conserve_told", _Told())
    if kv is not None and (told.kv is None or _loaded(kv) > _loaded(told.kv)):
        told.kv = kv
    told.encoded = told.encoded.plus(wire.encoded(ec))
    return told.kv, {wire.ENCODED: list(told.encoded)} if any(told.encoded) else None


def _loaded(kv: dict[str, Any]) -> int:
    return wire.cached_tokens(kv).lmcache_tokens or 0


PATCH = Patch(
    name="last_choice",
    seams=of("vllm.v1.engine.output_processor:RequestState", "make_request_output parent_req"),
    why="a turn of several choices counts KV as computed that one of them has loaded",
    upstream="not reported: with n>1 RequestOutput.add() overwrites transfer parameters, with None",
    process="server",
)
