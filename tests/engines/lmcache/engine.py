"""A vLLM engine with the connector, and without Ray; told what to do as `worker` is."""

import os
import sys
from typing import Any

from conserve.engines import engine_arguments, engine_environment, model_source
from conserve.settings import EMBEDDED_MODEL
from tests.engines.lmcache.worker import say


def arguments(port: str, connector: str, module: str, role: str) -> dict[str, Any]:
    """Of vLLM, for an engine on a CPU whose connector knows an LMCache server."""
    chosen = engine_arguments(EMBEDDED_MODEL, gpu=False)
    for name in ("enable_prompt_tokens_details", "enable_auto_tool_choice", "tool_call_parser"):
        chosen.pop(name, None)
    return {
        **chosen,
        "model": model_source(EMBEDDED_MODEL),
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": int(port),
                "lmcache.mp.mq_timeout": 10,
                "lmcache.mp.heartbeat_interval": 1,
            },
        },
    }


def main(port: str) -> None:
    os.environ.update(engine_environment(EMBEDDED_MODEL, gpu=False))
    from vllm import LLM, SamplingParams

    engine = LLM(
        **arguments(
            port, "ResilientMPConnector", "deployments.engine.lmcache_connector", "kv_producer"
        )
    )
    say("ready")
    for line in sys.stdin:
        if line.strip() == "prefill":
            prompt = {"prompt_token_ids": list(range(5, 405))}
            engine.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        else:
            # What a replica asks of its workers at its end (`EngineServer`).
            engine.collective_rpc("shutdown")
        say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
