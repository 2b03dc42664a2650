"""A bare engine that is shown images, with all layers of its vision tower or with a few.

``python -m tests.engines.vision.offloaded MODEL [KEPT]`` prints a line of JSON.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from conserve.engines import engine_environment
from tests.checkout import ROOT
from tests.engines.vision.turns import OUTPUT_TOKENS, new_image, said, user

_IMAGES = 3
_START_S = 600.0


def shown(model: Path, *kept: int, gpu: bool = False) -> dict[str, Any]:
    """What such an engine answers, and what memory it has, in a process of its own.

    Args:
        kept: how many layers stay, as `media.tower_layers`; without it, all.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.vision.offloaded", str(model), *map(str, kept)],
        cwd=ROOT, env=os.environ | engine_environment(str(model), gpu),
        capture_output=True, text=True, timeout=_START_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    # vLLM logs there, too, and ends last.
    told = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(told)
    return found


def _answered(model: str, kept: int | None) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from conserve_inside.addon import TOWER_CONNECTOR, TOWER_LAYERS

    offloads = {**TOWER_CONNECTOR, "ec_connector_extra_config": {TOWER_LAYERS: kept}}
    engine = LLM(
        model,
        enforce_eager=True,
        dtype="float32" if current_platform.is_cpu() else "bfloat16",
        max_model_len=2048,
        limit_mm_per_prompt={"image": 2},
        worker_extension_cls="tests.engines.vision.unpacked.UnpackedWorker",
        ec_transfer_config={
            "ec_connector": "NodeEncoderCache",
            "ec_connector_module_path": "deployments.engine.vision.connector",
            "ec_role": "ec_both",
            **(offloads if kept is not None else {}),
        },
    )
    rng = random.Random(0)
    greedy = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    tokens = []
    for _ in range(_IMAGES):
        message = user(said(("Look:", "What is it?"), new_image(rng)))
        (answer,) = engine.chat([message], greedy, use_tqdm=False)
        tokens.append(list(answer.outputs[0].token_ids))
    (memory,) = engine.collective_rpc("conserve_memory")
    return {"tokens": tokens, **memory}


def main() -> None:
    """Print what the engine named on the command line has answered."""
    model, *kept = sys.argv[1:]
    sys.stdout.write(json.dumps(_answered(model, int(kept[0]) if kept else None)) + "\n")


if __name__ == "__main__":
    main()
