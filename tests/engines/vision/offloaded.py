"""A lone engine that is shown images: ``python -m tests.engines.vision.offloaded MODEL [KEPT]``.

With a number, so many layers of the vision tower stay, as `media.tower_layers` has it. It prints a
line of JSON.
"""

import json
import random
import sys
from typing import Any

from vllm import LLM, SamplingParams

from deployments.engine.vision.offload import TOWER_LAYERS
from tests.engines.vision.turns import OUTPUT_TOKENS, new_image, said, user

IMAGES = 3


def shown(model: str, kept: int | None, **arguments: Any) -> dict[str, Any]:
    """Return tokens of answers about images, and the engine's memory."""
    engine = LLM(
        model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        limit_mm_per_prompt={"image": 2},
        worker_extension_cls="tests.engines.vision.unpacked.UnpackedWorker",
        ec_transfer_config={
            "ec_connector": "NodeEncoderCache",
            "ec_connector_module_path": "deployments.engine.vision.connector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {TOWER_LAYERS: kept},
        },
        **arguments,
    )
    rng = random.Random(0)
    greedy = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    tokens = []
    for _ in range(IMAGES):
        message = user(said(("Look:", "What is it?"), new_image(rng)))
        answers = engine.chat([message], greedy, use_tqdm=False)
        tokens.append(list(answers[0].outputs[0].token_ids))
    ((tower_bytes, physical_bytes),) = engine.collective_rpc("tower_bytes")
    return {
        "tokens": tokens,
        "tower_bytes": tower_bytes,
        "physical_bytes": physical_bytes,
        "kv_blocks": engine.llm_engine.vllm_config.cache_config.num_gpu_blocks,
    }


def main() -> None:
    """Print what `shown` returns."""
    model, *kept = sys.argv[1:]
    sys.stdout.write(json.dumps(shown(model, int(kept[0]) if kept else None)) + "\n")


if __name__ == "__main__":
    main()
