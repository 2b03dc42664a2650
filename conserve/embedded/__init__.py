"""The embedded model: a small Qwen3-architecture checkpoint that needs no download.

It exists so that the whole system can be run, tested and measured anywhere. Its weights are
random (from a fixed seed, the same bytes on every machine), so what it says is a string of
unrelated words; how it is served is the real thing.

Two properties matter to a server of conversations and are built in:

- *Its text round-trips.* An agent sends an answer back as text, and the decoder finds that
  history in its prefix cache only if the text becomes the very tokens that were generated. The
  model therefore says only whole words that the tokenizer maps back to themselves.
- *Its output depends on all of its input*, so a wrong or stale KV cache shows in the text.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

VERSION = 1
SEED = 20_26
MODEL_NAME = "conserve-embedded"

_HERE = Path(__file__).resolve().parent
_HIDDEN = 256
_INTERMEDIATE = 768
_LAYERS = 4
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 64
_MAX_POSITION = 32_768
# Dimension 0 of the residual stream is held constant (see _weights), so that an output row's
# first entry acts as the token's bias, which the architecture itself does not have.
_SILENT_BIAS = -40.0
_EOS = "<|im_end|>"


def model_path(root: Path | None = None) -> Path:
    """Directory of the embedded checkpoint, made on first use (a second or two, 14 MB).

    Args:
        root: where to keep it; default ``$CONSERVE_HOME``, else ``~/.cache/conserve``.

    Raises:
        OSError: the directory cannot be written; set ``CONSERVE_HOME`` to one that can.
    """
    base = root or Path(os.environ.get("CONSERVE_HOME") or Path.home() / ".cache" / "conserve")
    target = base / "models" / f"{MODEL_NAME}-v{VERSION}"
    if (target / "model.safetensors").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may get here at once: each makes its own, and the first rename wins.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_checkpoint(staging)
        os.chmod(staging, 0o755)
        try:
            staging.rename(target)
        except OSError:
            if not (target / "model.safetensors").exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def write_checkpoint(directory: Path) -> None:
    """Write config, tokenizer, chat template and weights of the embedded model."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_HERE / "tokenizer.json"))
    template = (_HERE / "chat_template.jinja").read_text()
    eos = tokenizer.token_to_id(_EOS)
    _write_json(directory / "config.json", _config(tokenizer.get_vocab_size(), eos))
    _write_json(directory / "generation_config.json", {"eos_token_id": eos})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _EOS,
            "pad_token": "<|endoftext|>",
            "model_max_length": _MAX_POSITION,
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(template)
    shutil.copyfile(_HERE / "tokenizer.json", directory / "tokenizer.json")
    save_file(_weights(tokenizer), directory / "model.safetensors", metadata={"format": "pt"})


def _config(vocab_size: int, eos: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "float32",
        "eos_token_id": eos,
        "bos_token_id": None,
    }


def _weights(tokenizer: Any) -> dict[str, Any]:
    """Random weights, in float32, keyed by the names that Qwen3 checkpoints use."""
    import numpy as np

    rng = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return (rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    vocab_size = tokenizer.get_vocab_size()
    ones = np.ones(_HIDDEN, np.float32)
    embedding = matrix(vocab_size, _HIDDEN, gain=_HIDDEN**0.5)
    embedding[:, 0] = 1.0
    output = matrix(vocab_size, _HIDDEN, gain=3.0)
    output[:, 0] = [0.0 if spoken else _SILENT_BIAS for spoken in _spoken(tokenizer)]
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": output,
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        attention_out = matrix(_HIDDEN, _HEADS * _HEAD_DIM, gain=2.0)
        mlp_out = matrix(_HIDDEN, _INTERMEDIATE, gain=2.0)
        attention_out[0] = 0.0
        mlp_out[0] = 0.0
        weights |= {
            prefix + "input_layernorm.weight": ones.copy(),
            prefix + "post_attention_layernorm.weight": ones.copy(),
            # A gain over 1 sharpens attention, so that single tokens far back still matter.
            prefix + "self_attn.q_norm.weight": np.full(_HEAD_DIM, 1.5, np.float32),
            prefix + "self_attn.k_norm.weight": np.full(_HEAD_DIM, 1.5, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": attention_out,
            prefix + "mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": mlp_out,
        }
    return weights


def _spoken(tokenizer: Any) -> list[bool]:
    """Which tokens the model says: " word" tokens that encode back to themselves, and the end."""
    spoken = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        word = text[1:]
        spoken.append(
            tokenizer.id_to_token(token_id) == _EOS
            or (
                text[:1] == " "
                and word.isascii()
                and word.isalpha()
                and len(word) > 1
                and tokenizer.encode(text, add_special_tokens=False).ids == [token_id]
            )
        )
    return spoken


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
