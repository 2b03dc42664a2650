"""A vision-language model of random weights, made in seconds: an Idefics3 that reads nothing well.

Its text model is a small Llama on the embedded model's tokenizer. (Of the models that vLLM serves,
Idefics3 needs no torchvision.) An image is cut into four tiles and a small version of the whole.
"""

from pathlib import Path

from conserve.embedded import model_path

# Placeholders of each tile; markers come on top.
TILE_TOKENS = 16
_IMAGE = "<image>"
_SPECIAL = (_IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TILE_PIXELS = 56
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(folder: Path) -> None:
    """Make the model there, always the same."""
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model_path() / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL),
    )
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
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_TILE_PIXELS,
        patch_size=7,
        initializer_range=0.2,
    )
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        # A tile has 8 x 8 patches; 2 x 2 of them become a token.
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * _TILE_PIXELS}, max_image_size={"longest_edge": _TILE_PIXELS}
        ),
        tokenizer=tokenizer,
        image_seq_len=TILE_TOKENS,
        chat_template=_TEMPLATE,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
