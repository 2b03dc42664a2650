"""A model of random weights in Qwen3-0.6B's shape: what it says means nothing, its costs are real.

28 layers of 1,024, 16 heads and 8 KV heads of 128: 112 KiB of KV a token. Its vocabulary is the
embedded model's, so that text goes in and comes out.
"""

import shutil
from pathlib import Path

from conserve.embedded import model_path

LAYERS = 28


def make_real_shape(folder: Path, layers: int = LAYERS) -> None:
    """Make the model there, always the same."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1_000_000,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, weights in model.named_parameters():
        if weights.dim() == 1:
            weights.data.fill_(1)  # Norms.
            continue
        # So large that which token is the likeliest does not hang on rounding.
        scale = 1.0 if "embed" in name else weights.shape[1] ** -0.5
        made = torch.randn(weights.shape, generator=generator) * scale
        weights.data.copy_(made.to(torch.bfloat16))
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = model_path() / "chat_template.jinja"
    if template.exists():
        shutil.copy(template, folder)
