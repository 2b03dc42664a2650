"""Reads a model's configuration as its class does, with the class's defaults.

A ``config.json`` may leave out what its class has by default (Gemma 3 does), have its own names for
it, or say in its class's own way which layers have attention (Jamba, Nemotron-H).
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from hetero import vision_tower
from hetero.model_shape import READ

logger = logging.getLogger("conserve.models")


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with its class's defaults, the language model's on the first level.

    Those of a vision tower stay in ``vision_config``. A class that transformers does not have, or
    that refuses the configuration, adds nothing.
    """
    # It loads PyTorch.
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return dict(config)
    # Classes warn of values that do not matter for a model's size.
    noise = logging.getLogger("transformers")
    level = noise.level
    noise.setLevel(logging.ERROR)
    try:
        whole = CONFIG_MAPPING[kind].from_dict(dict(config))
        found = values(whole.get_text_config())
        seen = _of_tower(whole, config)
    except Exception as error:
        logger.info("transformers does not read a configuration of %r: %s", kind, error)
        return dict(config)
    finally:
        noise.setLevel(level)
    # Written values win, since classes may change them into what they compute with.
    written = {**config, **(config.get("text_config") or {})}
    written.pop("text_config", None)
    return {**found, **_said(written), **seen}


def _of_tower(whole: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `hetero.vision_tower` reads of a multimodal model's configuration."""
    vision = getattr(whole, "vision_config", None)
    if vision is None:
        return {}
    own = {name: getattr(whole, name) for name in vision_tower.READ if hasattr(whole, name)}
    inner = {**vision.to_dict(), **_said(config.get("vision_config") or {})}
    return {**own, vision_tower.KIND: config["model_type"], "vision_config": inner}


def _said(written: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if value is not None}


def values(config: Any) -> dict[str, Any]:
    """Return the values of a transformers configuration that are read here."""
    found: dict[str, Any] = config.to_dict()
    for name in READ:
        with contextlib.suppress(Exception):
            # Some classes have it by another name, or compute it. A value that differs among layers
            # is in `per_layer_config` instead.
            found[name] = getattr(config, name)
    return found
