"""Plays random turns with a Qwen-VL of random weights, on an engine with a lane and without.

``python -m tests.engines.vision.qwen qwen2_5_vl FOLDER`` makes the model in the folder.

Its positions are three numbers each (M-RoPE). vLLM imports torchvision for it, which the set-up for
CPUs lacks; `make test-vision` fetches its Python files, and this process has them on its path.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engines.vision.model import tokenizer_with
from tests.unit.conserve_inside.lane.engine import Engine
from tests.unit.conserve_inside.lane.playing import noted_encodes, require_same_tokens

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
# Of patches that are merged, two by two. So an image has 6 x 4 tokens.
_SIZE = (12, 8)


def make_model(folder: Path, deepstack: bool) -> int:
    """Make a Qwen3-VL with ``deepstack``, or a Qwen2.5-VL; returns a patch's pixels."""
    import transformers

    tokenizer = tokenizer_with(
        _SPECIAL,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )
    kind = "Qwen3VL" if deepstack else "Qwen2_5_VL"
    patch_pixels = 16 if deepstack else 14
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # So large that what it says depends on every part of the prompt.
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [12, 10, 10] if deepstack else [8, 12, 12],
            **({"mrope_interleaved": True} if deepstack else {}),
        },
    }
    tower = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": patch_pixels,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
    }
    if deepstack:
        # vLLM looks at what serves the text alone.
        text |= {"head_dim": 64, "architectures": ["Qwen3ForCausalLM"]}
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}
    else:
        tower |= {"window_size": 4 * patch_pixels, "fullatt_block_indexes": [3]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=False,
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    patches = {"patch_size": patch_pixels, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 28 * 28, "longest_edge": 512 * 512}
    videos = "Qwen3VL" if deepstack else "Qwen2VL"
    processor = getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**patches, size=size),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{videos}VideoProcessor")(**patches),
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return patch_pixels


def _note_cut_images(forward: Any) -> set[str]:
    """Note images in whose midst a chunk of the lane begins."""
    cut: set[str] = set()
    compute = forward.compute

    def noting(job: Any, start: int, end: int) -> Callable[[], None]:
        for image in job.images:
            place = image.mm_position
            if place.offset < start < place.offset + place.length:
                cut.add(image.identifier)
        return compute(job, start, end)

    forward.compute = noting
    return cut


def main(folder: Path, deepstack: bool) -> None:
    patch_pixels = make_model(folder, deepstack)
    size = _SIZE[0] * patch_pixels, _SIZE[1] * patch_pixels
    with torch.compiler.set_stance("force_eager"):
        engine = Engine(folder, image=_IMAGE)
        cut = _note_cut_images(engine.thread._forward)
        with noted_encodes(engine) as encodes:
            require_same_tokens(engine, encodes, prefills=not deepstack, size=size)
        assert bool(cut) is not deepstack, "whether chunks begin in the midst of images"
        engine.core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[2]), deepstack=sys.argv[1] == "qwen3_vl")
