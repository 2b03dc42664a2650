"""The embedded models: small checkpoints that need no download. One reads text, the other sees.

With them the whole system can be run, tested and measured anywhere.

``scripts/embedded`` trained the first, of Qwen3's architecture, on the tasks of
``benchmarks.agent``: it reads tools' schemas, calls one a turn in the Hermes format, and answers
with the results. Without tools it answers with parts of what was said to it.

Its weights rule out all tokens but those that training had it say, and the tokenizer cuts any
sequence of those as it was said. So an answer sent back as text is found in the prefix cache. Its
output depends on the conversation, so a wrong or stale KV cache shows in the text.

``scripts/seeing`` trained the second, an Idefics3, on the screens of ``benchmarks.agent.screens``:
it clicks the highlighted button of the newest screenshot, until none is highlighted. It knows
nothing else. It has the first one's tokenizer and chat template.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

VERSION = 2
VISION_VERSION = 1
MODEL_NAME = "conserve-embedded"
VISION_MODEL_NAME = "conserve-embedded-vision"

# Idefics3 cuts a screenshot of this side into 2 x 2 tiles, and has a small version of the whole
# beside them; 2 x 2 patches of a tile become a token. (vLLM cannot serve an image of one tile.)
IMAGE_PX = 256
TILE_PX = 128
PATCH_PX = 16
SCALE = 2
TILE_TOKENS = (TILE_PX // PATCH_PX // SCALE) ** 2
IMAGE = "<image>"
_IMAGE_EDGE, _WHOLE = "<fake_token_around_image>", "<global-img>"
_TILES = [[f"<row_{row}_col_{column}>" for column in (1, 2)] for row in (1, 2)]
# What a screenshot is in a prompt.
SHOWN = (
    "".join(
        "".join(_IMAGE_EDGE + tile + IMAGE * TILE_TOKENS for tile in tiles) + "\n"
        for tiles in _TILES
    )
    + f"\n{_IMAGE_EDGE}{_WHOLE}{IMAGE * TILE_TOKENS}{_IMAGE_EDGE}"
)
# The processor adds the last by itself if it is not there.
_IMAGE_TOKENS = [IMAGE, _IMAGE_EDGE, _WHOLE, *_TILES[0], *_TILES[1], "<end_of_utterance>"]

_HERE = Path(__file__).resolve().parent
_MAX_POSITION = 32_768
_EOS = "<|im_end|>"
_PAD = "<|endoftext|>"


def model_path(root: Path | None = None, name: str = MODEL_NAME) -> Path:
    """Return the directory of an embedded model's checkpoint, made on first use (6 to 10 MB).

    By default it is in ``$CONSERVE_HOME``, else in ``~/.cache/conserve``. OSError if that is not
    writable.
    """
    base = root or Path(os.environ.get("CONSERVE_HOME") or Path.home() / ".cache" / "conserve")
    version = VISION_VERSION if name == VISION_MODEL_NAME else VERSION
    target = base / "models" / f"{name}-v{version}"
    if (target / "model.safetensors").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once: each makes its own, and the first rename wins.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if name == VISION_MODEL_NAME:
            write_vision_checkpoint(staging)
            shutil.copyfile(_HERE / "vision.safetensors", staging / "model.safetensors")
        else:
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
    for name in ("tokenizer.json", "model.safetensors"):
        shutil.copyfile(_HERE / name, directory / name)
    _write_rest(directory, eos)


def write_vision_checkpoint(directory: Path) -> None:
    """Write all files of the model that sees, but the weights: training has them from elsewhere."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_HERE / "tokenizer.json"))
    tokenizer.add_special_tokens(_IMAGE_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos, pad, image = map(tokenizer.token_to_id, (_EOS, _PAD, IMAGE))
    config = _vision_config(tokenizer.get_vocab_size(), eos, pad, image)
    _write_json(directory / "config.json", config)
    _write_json(directory / "processor_config.json", _PROCESSOR)
    _write_rest(directory, eos)


def _write_rest(directory: Path, eos: int) -> None:
    _write_json(directory / "generation_config.json", {"eos_token_id": eos})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _EOS,
            "pad_token": _PAD,
            "model_max_length": _MAX_POSITION,
            "clean_up_tokenization_spaces": False,
        },
    )
    shutil.copyfile(_HERE / "chat_template.jinja", directory / "chat_template.jinja")


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


def _vision_config(vocab_size: int, eos: int, pad: int, image: int) -> dict[str, Any]:
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "bos_token_id": None,
        "pad_token_id": pad,
    }
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": TILE_PX,
        "patch_size": PATCH_PX,
    }
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": text,
        "vision_config": vision,
        "scale_factor": SCALE,
        "image_token_id": image,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


_PROCESSOR: dict[str, Any] = {
    "processor_class": "Idefics3Processor",
    "image_seq_len": TILE_TOKENS,
    "image_processor": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": TILE_PX},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": IMAGE_PX},
    },
}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
