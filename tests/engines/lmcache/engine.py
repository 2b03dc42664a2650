"""A vLLM engine with the connector, and without Ray; told what to do as `worker` is."""

import os
import sys

from conserve.engines import engine_arguments, engine_environment, model_source
from conserve.settings import EMBEDDED_MODEL
from tests.engines.lmcache.worker import say


def main(port: str) -> None:
    os.environ.update(engine_environment(EMBEDDED_MODEL, gpu=False))
    from vllm import LLM, SamplingParams

    connector = {
        "kv_connector": "ResilientMPConnector",
        "kv_connector_module_path": "deployments.engine.lmcache_connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": int(port),
            "lmcache.mp.mq_timeout": 10,
            "lmcache.mp.heartbeat_interval": 1,
        },
    }
    arguments = engine_arguments(EMBEDDED_MODEL, gpu=False)
    for name in ("enable_prompt_tokens_details", "enable_auto_tool_choice", "tool_call_parser"):
        arguments.pop(name, None)
    engine = LLM(
        model_source(EMBEDDED_MODEL),
        kv_transfer_config=connector,
        enable_prefix_caching=True,
        **arguments,
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
