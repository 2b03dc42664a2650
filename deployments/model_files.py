"""Finds what decides a model's size: its ``config.json``, and how large its weights' files are.

In a folder, in Hugging Face's cache, or on its hub, of which the configuration alone is fetched.
"""

import json
from pathlib import Path

import httpx
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from conserve.engines import model_source
from conserve.settings import Settings
from deployments.model_config import with_defaults
from hetero.model_shape import ModelShape, ModelUnknown, shape_of

_HUB_ERRORS = (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError)
_INDEX = "model.safetensors.index.json"


def model_shape(settings: Settings) -> ModelShape:
    """The shape of the model that is served.

    Raises:
        ModelUnknown: its configuration is not to be had, or does not say enough.
    """
    source = model_source(settings.model)
    folder = Path(source).expanduser()
    dtype = str(settings.engine.get("dtype", "auto"))
    if folder.is_dir():
        config = with_defaults(_config(folder / "config.json"))
        return shape_of(config, _weights_in(folder), dtype)
    cached = try_to_load_from_cache(source, "config.json") if _is_hub_id(source) else None
    if isinstance(cached, str):
        path = Path(cached)
        return shape_of(with_defaults(_config(path)), _weights_in(path.parent), dtype)
    return shape_of(with_defaults(_fetched(source)), _weights_on_hub(source), dtype)


def _is_hub_id(source: str) -> bool:
    return source.count("/") <= 1 and "://" not in source


def _config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnknown(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnknown(f"{path} is no object")
    return config


def _weights_in(folder: Path) -> int | None:
    """Bytes of weights; None if they are not all there, or of another format."""
    index = folder / _INDEX
    if index.is_file():
        total = _config(index).get("metadata")
        size = total.get("total_size") if isinstance(total, dict) else None
        return int(size) if size else None
    # `consolidated.safetensors` are the same weights once more.
    files = list(folder.glob("model*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def _fetched(source: str) -> dict[str, object]:
    why: Exception | str = "it is neither a folder here nor an id on Hugging Face's hub"
    if _is_hub_id(source):
        try:
            return _config(Path(hf_hub_download(source, "config.json", etag_timeout=10)))
        except _HUB_ERRORS as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    raise ModelUnknown(
        f"config.json of {source!r} is not to be had ({why}); download the model, and give its "
        "folder or its id"
    )


def _weights_on_hub(source: str) -> int | None:
    try:
        files = HfApi().model_info(source, files_metadata=True, timeout=10).siblings or []
    except _HUB_ERRORS:
        # Then parameters are counted from the configuration.
        return None
    sizes = [
        file.size or 0
        for file in files
        if file.rfilename.startswith("model") and file.rfilename.endswith(".safetensors")
    ]
    return sum(sizes) or None
