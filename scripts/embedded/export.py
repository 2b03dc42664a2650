"""Ships a trained checkpoint: ``python -m scripts.embedded.export DIRECTORY``.

Writes ``conserve/embedded/model.safetensors``, in bfloat16, under Qwen3's names.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.embedded.data import EMBEDDED

TARGET = EMBEDDED / "model.safetensors"
# Column 0 of the output matrix is a bias, small once the residual stream is normalised: tokens that
# never occur in training's answers are never generated.
_NEVER = -10_000.0


def exported(state: dict[str, Tensor], said: Tensor) -> dict[str, Tensor]:
    """Return the model's weights as vLLM and transformers load them."""
    weights = {f"model.{name}": value for name, value in state.items() if name != "output"}
    vocab_size, hidden = state["embed_tokens.weight"].shape
    output = torch.zeros(vocab_size, hidden)
    output[:, 0] = _NEVER
    output[said] = state["output"]
    weights["lm_head.weight"] = output
    return {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="what scripts.embedded.train was given")
    parser.add_argument("--to", type=Path, default=TARGET, help="the file to write")
    arguments = parser.parse_args()
    state = torch.load(arguments.directory / "checkpoint.pt", weights_only=True)
    weights = exported(state["model"], state["said"])
    save_file(weights, arguments.to, metadata={"format": "pt"})
    count = sum(value.numel() for value in weights.values())
    print(f"{arguments.to}: {count:,} parameters, {arguments.to.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
