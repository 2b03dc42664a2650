"""Works out a vision tower's memory from a model's ``config.json``: weights, encoding, cache. Pure.

An engine of vLLM 0.32 encodes its largest batch of images as it starts, to measure. Its encoder
cache holds as many embeddings as a step has tokens, or those of the largest item. The memory in
which a tower encodes is an estimate, as a step's is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Members of a configuration that describe an encoder; the others are those of a few models.
ENCODERS = ("vision_config", "audio_config")
_OTHERS = ("thinker_config", "vision_tower", "mm_vision_tower", "img_processor", "vit_config")
# The outer configuration's values that `tower_of` reads, beside its kind.
READ = ("scale_factor", "mm_tokens_per_image", "spatial_merge_size")
# The member in which `deployments.model_config` keeps a multimodal model's kind.
KIND = "multimodal_type"
_MERGED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_TILED = ("idefics3", "smolvlm")
_PLAIN = ("gemma3", "llava", "mistral3")
# Embeddings of an image in the first group, as these models are published, if no file says it.
_MERGED_IMAGE = 16_384
# vLLM measures a video of 14 frames, if they fit the longest sequence; patches are two frames deep.
_VIDEOS, _MOST_DEPTH = ("qwen2_vl", "qwen2_5_vl"), 7
# Larger images are made smaller before they are cut into tiles.
_MOST_EDGE = 4096
# vLLM's defaults: items of a modality in a prompt, and the fewest sequences.
_ITEMS, _SEQS = 999, 256


class TowerUnknown(ValueError):
    """The encoder is not known here, or its configuration lacks a value; the message says which."""


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision encoder with its projector, as far as its memory goes."""

    parameters: int
    layers: int
    layer_parameters: int
    heads: int
    patch_values: int  # The most values that a patch has at a time; an estimate.
    embedding_patches: float  # Patches that become one embedding.
    embedding_values: int
    image: int  # Embeddings of the largest image.
    most_depth: int = 0  # The largest video has as many images' embeddings; 0: it reads none.
    shares_items: bool = False  # Whether workers may divide images instead of weights.
    # How many layers stay on the GPU, if not all; the others are copied in from host memory.
    kept_layers: int | None = None

    def keeping(self, layers: int | None) -> "Tower":
        """Return the tower with this many layers on the GPU (``media.tower_layers``)."""
        offloads = layers is not None and layers < self.layers
        return replace(self, kept_layers=layers if offloads else None)


@dataclass(frozen=True, slots=True)
class TowerNeeds:
    """GPU memory that a vision tower takes of each worker."""

    weights_bytes: int
    encode_bytes: int  # To encode the largest batch; an estimate.
    cache_bytes: int  # vLLM's encoder cache, when it is full.
    embeddings: int  # Embeddings that it holds.
    batch: str  # The largest batch, in words.
    has_video: bool = False  # Whether that is a video.
    host_bytes: int = 0  # Pinned host memory with all layers, if some are not on the GPU.
    kept: str = ""  # Layers that stay on the GPU, in words; empty: all.


def tower_of(
    config: Mapping[str, Any], hidden: int, processor: Mapping[str, Any] | None = None
) -> Tower | None:
    """Return a model's vision tower; None: it reads text only.

    Args:
        hidden: the language model's hidden size.
        processor: the values of its ``preprocessor_config.json``, which limit images' sizes.

    Raises:
        TowerUnknown: it has an encoder that is not known here.
    """
    found = [name for name in (*ENCODERS, *_OTHERS) if config.get(name)]
    if not found:
        return None
    kind = str(config.get(KIND) or config.get("model_type"))
    vision = config.get("vision_config")
    if kind not in (*_MERGED, *_TILED, *_PLAIN) or not isinstance(vision, Mapping):
        raise TowerUnknown(f"the encoder of {kind!r} ({', '.join(found)}) is not known")
    # In Qwen2-VL's configurations, `hidden_size` is the language model's.
    width = _number(vision, "embed_dim", "hidden_size")
    layers, patch = _number(vision, "depth", "num_hidden_layers"), _number(vision, "patch_size")
    inner = int(vision.get("intermediate_size") or vision.get("mlp_ratio", 4) * width)
    pixtral = vision.get("model_type") == "pixtral"
    gated = kind == "qwen2_5_vl" or pixtral
    rotary = kind in _MERGED or pixtral
    channels = int(vision.get("in_channels") or vision.get("num_channels") or 3)
    pixels = channels * patch**2 * int(vision.get("temporal_patch_size") or 1)
    side = 0 if kind in _MERGED else _number(vision, "image_size") // patch
    positions = int(vision.get("num_position_embeddings") or (0 if pixtral else side**2))
    outputs = 1 + len(vision.get("deepstack_visual_indexes") or ())
    image, patches, projector = _projected(kind, config, vision, width, hidden, processor or {})
    layer = 4 * width**2 + (3 if gated else 2) * width * inner
    parameters = layers * layer + (pixels + positions) * width + outputs * projector
    # As measured on vLLM's modules, beside the pixels: around attention the layer's input, residual
    # and norm, queries, keys and values, which are copied to be rotated, and the output twice;
    # around the feed-forward part its gates, too; in the projector two layers' outputs. What
    # earlier layers have put out (Qwen3-VL) stays meanwhile.
    attention = (12 if rotary else 8) * width
    forward = 5 * width + 3 * inner if gated else 4 * width + 2 * inner
    kept = math.ceil((outputs - 1) * hidden / patches)
    projecting = 3 * width + math.ceil((1 + outputs) * hidden / patches)
    return Tower(
        parameters=parameters,
        layers=layers,
        layer_parameters=layer,
        heads=_number(vision, "num_heads", "num_attention_heads"),
        patch_values=pixels + kept + max(attention, forward, projecting),
        embedding_patches=patches,
        embedding_values=outputs * hidden,
        image=image,
        most_depth=_MOST_DEPTH if kind in _VIDEOS else 0,
        shares_items=kind in _MERGED,
    )


def _projected(
    kind: str,
    config: Mapping[str, Any],
    vision: Mapping[str, Any],
    width: int,
    hidden: int,
    processor: Mapping[str, Any],
) -> tuple[int, float, int]:
    """Return the largest image's embeddings, the patches of one, and a projector's parameters."""
    patch = _number(vision, "patch_size")
    size = processor.get("size")
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    if kind in _MERGED:
        merge = int(vision.get("spatial_merge_size") or 2)
        pixels = processor.get("max_pixels") or edge
        image = _MERGED_IMAGE if not pixels else max(1, int(pixels) // (patch * merge) ** 2)
        merged = width * merge**2
        return image, merge**2, merged**2 + merged * hidden
    side = _number(vision, "image_size") // patch
    if kind == "gemma3":
        image = _number(config, "mm_tokens_per_image")
        return image, side**2 / image, width * hidden
    if kind in _TILED:
        scale = _number(config, "scale_factor")
        tile = processor.get("max_image_size") or vision.get("max_image_size") or {}
        tile_edge = int(tile.get("longest_edge") or _number(vision, "image_size"))
        if edge is None:
            edge = (vision.get("size") or {}).get("longest_edge") or 4 * tile_edge
        rows = math.ceil(min(int(edge), _MOST_EDGE) / tile_edge)
        if processor.get("do_image_splitting") is False:
            rows = 1
        tiles = rows**2 + (1 if rows > 1 else 0)
        return tiles * (side**2 // scale**2), scale**2, width * scale**2 * hidden
    if kind == "mistral3":
        merge = int(config.get("spatial_merge_size") or 2)
        side = int(edge or _number(vision, "image_size")) // (patch * merge)
        return side**2, merge**2, (width * merge) ** 2 + width * hidden + hidden**2
    return side**2, 1, width * hidden + hidden**2


def tower_needs(
    tower: Tower, value_bytes: int, arguments: Mapping[str, Any], longest: int
) -> TowerNeeds | None:
    """Return what a tower takes of each worker; None if an engine takes text only.

    Args:
        arguments: vLLM's engine arguments.
        longest: tokens of the longest sequence; 0: not known.
    """
    images, videos = (_items(arguments, name) for name in ("image", "video"))
    depth = min(tower.most_depth, max(1, longest // tower.image if longest else tower.most_depth))
    if arguments.get("language_model_only") or not (images or (videos and tower.most_depth)):
        return None
    tensor = int(arguments.get("tensor_parallel_size", 1))
    shared = tower.shares_items and arguments.get("mm_encoder_tp_mode") == "data"
    # Workers divide the weights, or else the images; with neither each does all of it.
    weights_by = 1 if shared or tower.heads % tensor else tensor
    weights, host, kept = tower.parameters * value_bytes // weights_by, 0, ""
    if tower.kept_layers is not None:
        layer = tower.layer_parameters * value_bytes // weights_by
        host = tower.layers * layer
        weights -= (tower.layers - tower.kept_layers) * layer
        kept = f"{tower.kept_layers} of its {tower.layers} layers"
    video = bool(videos) and depth > (1 if images else 0)
    item = tower.image * (depth if video else 1)
    embeddings = max(int(arguments["max_num_batched_tokens"]), item)
    most = videos if video else images
    fitting = max(1, min(most, longest // item if longest else most))
    items = min(embeddings // item, fitting * int(arguments.get("max_num_seqs") or _SEQS))
    said = f"{items} {'video' if video else 'image'}{'s' if items > 1 else ''} of {item:,}"
    encode = cache = 0
    # Otherwise operators say that they leave room for it themselves.
    if not arguments.get("skip_mm_profiling"):
        patches = math.ceil(items / (tensor if shared else 1)) * item * tower.embedding_patches
        encode = int(patches * tower.patch_values) * value_bytes // weights_by
        cache = embeddings * tower.embedding_values * value_bytes
    batch = f"{said} embeddings"
    return TowerNeeds(weights, encode, cache, embeddings, batch, video, host, kept)


def _items(arguments: Mapping[str, Any], modality: str) -> int:
    """Return how many items of a modality a prompt may have."""
    given = (arguments.get("limit_mm_per_prompt") or {}).get(modality, _ITEMS)
    return int(given.get("count", _ITEMS) if isinstance(given, Mapping) else given)


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    raise TowerUnknown(f"the encoder's configuration has no {' or '.join(names)}")
