"""A peer: Ray Serve LLM's own application and ingress, with the embedded model on one engine.

Run by `overhead`; alone: ``python -m benchmarks.experiments.ray_serve_llm 8001``.
"""

import sys
import time

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

from conserve.embedded import model_path

MODEL = "conserve-embedded"


def main() -> None:
    ray.init(namespace="serve", num_cpus=8, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(model_path())},
        engine_kwargs={
            "enforce_eager": True,
            "dtype": "bfloat16",
            "distributed_executor_backend": "mp",
            "max_model_len": 16384,
        },
        placement_group_config={"bundles": [{"CPU": 0.5}]},
        deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
        runtime_env={
            "env_vars": {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",
            }
        },
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
    print("ready", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
