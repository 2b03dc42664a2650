"""ConServe's own application, as the peers that differ in `placement` alone start it."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.options import Options, engine_arguments, engine_environment
from benchmarks.peers.plan import Part, PeerPlan, module


def application(
    name: str,
    options: Options,
    *settings: str,
    prefillers: int,
    decoders: int,
    engine: Mapping[str, Any] | None = None,
) -> PeerPlan:
    """``serve run conserve.app`` with these settings.

    Args:
        name: names the log file.
        options: what all peers are started with.
        settings: ``name=value`` settings beside model, port and engine arguments.
        prefillers: how many; 0 where the placement has none.
        decoders: how many; one or more.
        engine: engine arguments of this peer's own, over those of the options.
    """
    own = {"enable_prompt_tokens_details": True, **(engine or {}), **options.engine}
    arguments = [
        *settings,
        f"decoders={decoders}",
        *([f"prefillers={prefillers}"] if prefillers else []),
        f"model={options.model}",
        f"device={'gpu' if options.gpu else 'cpu'}",
        f"port={options.port}",
        # Several applications on one machine each have an LMCache server, on ports that are free.
        "lmcache.port=0",
        *(f"engine.{argument}={json.dumps(value)}" for argument, value in own.items()),
    ]
    all_arguments = engine_arguments(options) | own
    roles = {"prefiller": all_arguments, "decoder": all_arguments}
    return PeerPlan(
        parts=(
            Part(
                name,
                module("ray.serve.scripts", "run", "conserve.app", *arguments),
                engine_environment(options),
            ),
        ),
        engine_arguments=roles if prefillers else {"decoder": all_arguments},
        prefillers=prefillers,
        decoders=decoders,
        releases=True,
    )
