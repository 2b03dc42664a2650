"""Reads a model's configuration as its class does: with what the class says by default.

A ``config.json`` may leave out what is as its class has it (Gemma 3 does), have its own names for
it, or say in its class's own way which layers have attention (Jamba, Nemotron-H).
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from hetero.model_shape import READ

logger = logging.getLogger("conserve.models")


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with its class's defaults, the language model's on the first level.

    A class that transformers does not have, or that refuses the configuration, adds nothing.
    """
    # It loads PyTorch.
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return dict(config)
    # Classes comment on values that have nothing to do with a model's size.
    noise = logging.getLogger("transformers")
    level = noise.level
    noise.setLevel(logging.ERROR)
    try:
        found = values(CONFIG_MAPPING[kind].from_dict(dict(config)).get_text_config())
    except Exception as error:
        logger.info("transformers does not read a configuration of %r: %s", kind, error)
        return dict(config)
    finally:
        noise.setLevel(level)
    # What is written counts: classes may change it into what they compute with.
    written = {**config, **(config.get("text_config") or {})}
    written.pop("text_config", None)
    return {**found, **{name: value for name, value in written.items() if value is not None}}


def values(config: Any) -> dict[str, Any]:
    """Return what a configuration of transformers' says, by the names that are read of it."""
    found: dict[str, Any] = config.to_dict()
    for name in READ:
        with contextlib.suppress(Exception):
            # Some have it by another name, and some compute it. What differs among layers is no
            # value of the whole, and is in `per_layer_config`.
            found[name] = getattr(config, name)
    return found
