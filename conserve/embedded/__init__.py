"""The embedded model: a small Qwen3-architecture checkpoint that needs no download.

With it the whole system can be run, tested and measured anywhere. ``scripts/embedded`` trained it
on the tasks of ``benchmarks.agent``: it reads tools' schemas, calls one a turn in the Hermes
format, and answers with the results. Without tools it answers with parts of what was said to it.

Its weights rule out all tokens but those that training had it say, and the tokenizer cuts any
sequence of those as it was said. So an answer sent back as text is found in the prefix cache. Its
output depends on the conversation, so a wrong or stale KV cache shows in the text.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

VERSION = 2
MODEL_NAME = "conserve-embedded"

_HERE = Path(__file__).resolve().parent
_MAX_POSITION = 32_768
_EOS = "<|im_end|>"
_SHIPPED = ("tokenizer.json", "chat_template.jinja", "model.safetensors")


def model_path(root: Path | None = None) -> Path:
    """Return the directory of the embedded checkpoint, made on first use (10 MB).

    By default it is in ``$CONSERVE_HOME``, else in ``~/.cache/conserve``. OSError if that is not
    writable.
    """
    base = root or Path(os.environ.get("CONSERVE_HOME") or Path.home() / ".cache" / "conserve")
    target = base / "models" / f"{MODEL_NAME}-v{VERSION}"
    if (target / "model.safetensors").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once: each makes its own, and the first rename wins.
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
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_HERE / "tokenizer.json"))
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
    for name in _SHIPPED:
        shutil.copyfile(_HERE / name, directory / name)


def _config(vocab_size: int, eos: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": eos,
        "bos_token_id": None,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
