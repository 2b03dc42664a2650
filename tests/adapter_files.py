"""Makes LoRA adapters of random weights, in the files that PEFT writes, without that package."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# Each attention's and each MLP's, as adapters of Qwen's have them.
MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def make_adapter(
    folder: Path, model: Path, seed: int, rank: int = 8, base: str | None = None, size: float = 0.2
) -> Path:
    """Write an adapter of a Qwen-like model; of another seed, it gives other answers.

    Args:
        base: the name of its model; unset, the model's folder.
        size: the standard deviation of its weights.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "q_proj": (hidden, heads), "k_proj": (hidden, kv_heads), "v_proj": (hidden, kv_heads),
        "o_proj": (heads, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for part, modules in MODULES.items():
            for module in modules:
                takes, gives = shapes[module]
                name = f"base_model.model.model.layers.{layer}.{part}.{module}"
                for half, shape in (("A", (rank, takes)), ("B", (gives, rank))):
                    weight = torch.randn(shape, generator=draw) * size
                    tensors[f"{name}.lora_{half}.weight"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "base_model_name_or_path": base or str(model), "bias": "none", "lora_dropout": 0.0,
        "target_modules": sorted(shapes),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
