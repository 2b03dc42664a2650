"""A vision-language model of random weights, made in seconds: an Idefics3 that reads nothing well.

Its text model is a small Llama on the embedded model's tokenizer. (Of the models that vLLM serves,
Idefics3 needs no torchvision.) An image is cut into four tiles and a small version of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conserve.embedded import model_path

# Placeholders of each tile; markers come on top.
TILE_TOKENS = 16
_IMAGE = "<image>"
_SPECIAL = (_IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Tower:
    """The part that encodes tiles; `scale` x `scale` patches become a token."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    tile_pixels: int = 56
    patch_pixels: int = 7
    scale: int = 2


# It takes tens of milliseconds of an image; this one takes some ten times as long.
LARGE = Tower(hidden=192, layers=12, heads=3, tile_pixels=224, patch_pixels=14, scale=4)
# So many layers that a few of them can take turns.
DEEP = Tower(layers=6)

# A real tower's shape (SigLIP's with 400 M parameters), for GPUs.
REAL = Tower(hidden=1152, layers=27, heads=16, tile_pixels=224, patch_pixels=14, scale=4)


def tokenizer_with(special: Sequence[str], **named: str) -> Any:
    """The embedded model's tokenizer with more special tokens, of which some have names."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(model_path() / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        **({"extra_special_tokens": named} if named else {}),
    )


def make_vision_model(folder: Path, tower: Tower | None = None) -> None:
    """Make the model there, always the same."""
    tower = tower or Tower()
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    tokenizer = tokenizer_with(_SPECIAL)
    tokenizer.chat_template = _TEMPLATE
    text = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # So large that what it says depends on every part of the prompt.
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    vision = Idefics3VisionConfig(
        hidden_size=tower.hidden,
        intermediate_size=2 * tower.hidden,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        image_size=tower.tile_pixels,
        patch_size=tower.patch_pixels,
        initializer_range=0.2,
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=tower.scale,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * tower.tile_pixels},
            max_image_size={"longest_edge": tower.tile_pixels},
        ),
        tokenizer=tokenizer,
        image_seq_len=TILE_TOKENS,
        chat_template=_TEMPLATE,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
