"""Finds what decides a model's size: its ``config.json``, and the size of its weights' files.

They are in a folder, in Hugging Face's cache, or on its hub, from which only configurations are
fetched. For a model that reads images, its processor's says how large they may be.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is httpx's or httpx2's
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from conserve import adapters
from conserve.engines import model_source
from conserve.settings import EMBEDDED_MODELS, Settings, SettingsError
from deployments.model_config import with_defaults
from hetero.model_shape import ModelShape, ModelUnknown, shape_of
from hetero.vision_tower import ENCODERS

HUB_ERRORS = (HfHubHTTPError, HFValidationError, HTTPError, OSError)
# After these an engine cannot read the model either. `LocalEntryNotFoundError` means that the hub
# is not asked, or cannot be reached.
_MISSING = (
    RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError, LocalEntryNotFoundError,
    HFValidationError,
)  # fmt: skip
_INDEX = "model.safetensors.index.json"
# Older models have the first one, newer ones the image processor's values within the second.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# vLLM reads these without a `config.json`: Mistral's own format, and GGUF.
_OTHER_FORMATS = ("params.json", "*.gguf")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_TOKENIZERS = ("tokenizer*", "tekken.json", "vocab*", "*.tiktoken", "*.model")
# Bits of a weight by the beginning of vLLM's `quantization`, where engines quantise as they load.
_BITS = {"fp8": 8, "int8": 8, "experts_int8": 8, "mxfp8": 8, "bitsandbytes": 4.5, "nvfp4": 4.5}


class ModelMissing(ModelUnknown):
    """An engine here could not read the model: it is not there, or may not be fetched."""


def model_shape(settings: Settings) -> ModelShape:
    """Return the shape of the model that is served.

    Raises `ModelMissing` if an engine on this machine could not read it, and `ModelUnknown` if its
    configuration cannot be read, or does not say enough.
    """
    source = model_source(settings.model)
    # Where it matters, roles have the same (`conserve.settings.engine_arguments`).
    arguments = settings.engine | settings.decoders.engine
    config, weights, processor = _files(source, arguments.get("revision"))
    if settings.model not in EMBEDDED_MODELS:  # They lack no value, and this takes seconds.
        config = with_defaults(config)
    processor |= arguments.get("mm_processor_kwargs") or {}
    overrides = arguments.get("hf_overrides")
    if isinstance(overrides, dict):
        config = {**config, **overrides}
    dtypes = [str(arguments.get(name, "auto")) for name in ("dtype", "mamba_ssm_cache_dtype")]
    shape = shape_of(config, weights, dtypes[0], processor, dtypes[1])
    method = str(arguments.get("quantization"))
    bits = next((bits for name, bits in _BITS.items() if method.startswith(name)), None)
    if bits is None or config.get("quantization_config"):
        return shape
    # With scales, and what is not quantised: embeddings above all.
    quantised = round(1.15 * bits / 8 * shape.weights_bytes / shape.value_bytes)
    return dataclasses.replace(
        shape, weights_bytes=min(shape.weights_bytes, quantised), estimated=True
    )


def require_files(settings: Settings) -> None:
    """Check that a model's folder has weights and a tokenizer; raises `SettingsError`.

    Only a folder is looked at: what is not in Hugging Face's cache, engines fetch.
    """
    folder = Path(settings.model).expanduser()
    arguments = settings.engine | settings.decoders.engine
    others = [found for one in _OTHER_FORMATS for found in folder.glob(one)]
    if others or not (folder / "config.json").is_file():
        return
    problems = []
    if arguments.get("load_format", "auto") in ("auto", "safetensors", "pt"):
        shards = {folder / name for name in _shards(folder)}
        weights = sorted(shards) or [one for kind in _WEIGHTS for one in folder.glob(kind)]
        absent = [file.name for file in weights if not file.exists()]
        if not weights:
            problems.append(f"no weights ({', '.join(_WEIGHTS)})")
        elif absent:
            problems.append(f"{len(absent)} of {len(weights)} files of weights ({absent[0]}, ...)")
    elsewhere = arguments.get("tokenizer") or arguments.get("skip_tokenizer_init")
    if not (elsewhere or any(found for kind in _TOKENIZERS for found in folder.glob(kind))):
        problems.append(f"no tokenizer ({', '.join(_TOKENIZERS)})")
    if problems:
        raise SettingsError(f"model: {folder} lacks files: {'; '.join(problems)}; download it anew")


def require_adapters(settings: Settings) -> None:
    """Check the adapters that there are at the start; raises `SettingsError`."""
    try:
        for name, folder in adapters.folders_of(settings).items():
            require_adapter(name, Path(folder), settings.model)
    except adapters.AdapterError as error:
        raise SettingsError(f"adapters: {error}") from None


def require_adapter(name: str, folder: Path, model: str) -> None:
    """Raise `AdapterError` if a folder has no adapter of a model.

    Two ids on the hub tell, unless one begins with the other, as of a quantised model. Else sizes
    of layers do, where the model's weights are here.
    """
    base = str(adapters.config_of(folder).get("base_model_name_or_path"))
    if not any((folder / one).exists() for one in adapters.WEIGHTS):
        raise adapters.AdapterError(f"{name} has no weights: {folder / adapters.WEIGHTS[0]}")
    both = [one for one in (base, model) if "/" in one and _is_hub_id(one)]
    other = len(both) == 2 and not (base.startswith(model) or model.startswith(base))
    found = find_file(model_source(model), "config.json", None, fetches=False)
    if not other and found is not None:
        sizes = _sizes(found.parent.glob("*.safetensors"))
        for part, size in _sizes([folder / adapters.WEIGHTS[0]]).items():
            layer, half, _ = part.removeprefix("base_model.model.").rpartition(".lora_")
            # The first half takes what its layer takes, and the second gives what that gives.
            axis = int(part.endswith("_A.weight"))
            other |= bool(half) and sizes.get(f"{layer}.weight", size)[axis] != size[axis]
    if other:
        raise adapters.AdapterError(f"{name} is of another model ({base}) than {model}")


def _sizes(files: Iterable[Path]) -> dict[str, list[int]]:
    """Return the sizes of the matrices in files of weights, but for quantised ones."""
    found = {}
    for file in files:
        if not file.exists():
            continue
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, one in header.items():
            if len(one.get("shape", ())) == 2 and one["dtype"].startswith(("F", "BF")):
                found[name] = one["shape"]
    return found


def _shards(folder: Path) -> set[str]:
    index = folder / _INDEX
    if not index.is_file():
        return set()
    try:
        placed = _config(index).get("weight_map")
    except ModelUnknown as error:
        raise SettingsError(f"model: {error}; download it anew") from None
    return {str(file) for file in placed.values()} if isinstance(placed, dict) else set()


def _files(source: str, revision: str | None) -> tuple[dict[str, Any], int | None, dict[str, Any]]:
    """Return the model's configuration, the size of its weights in bytes, and its processor's."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            if any(found for name in _OTHER_FORMATS for found in folder.glob(name)):
                raise ModelUnknown(f"{folder} has no config.json, but another format's files")
            raise ModelMissing(f"{folder / 'config.json'} cannot be read: there is none")
        try:
            config = _config(folder / "config.json")
        except ModelUnknown as error:
            raise ModelMissing(str(error)) from None
        return config, _weights_in(folder), _processor(source, revision)
    if folder.is_file():
        raise ModelUnknown(f"{folder} is a file, without a configuration beside it")
    cached = find_file(source, "config.json", revision, fetches=False)
    if cached is not None:
        processor = _processor(source, revision, fetches=False)
        return _config(cached), _weights_in(cached.parent), processor
    config = _fetched(source, revision)
    found = _processor(source, revision) if any(map(config.get, ENCODERS)) else {}
    return config, _weights_on_hub(source, revision), found


def find_file(source: str, name: str, revision: str | None, *, fetches: bool = True) -> Path | None:
    """Return a model's file in its folder, in Hugging Face's cache, or fetched; None: no such."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    if _is_hub_id(source):
        with contextlib.suppress(*HUB_ERRORS):
            cached = try_to_load_from_cache(source, name, revision=revision)
            if isinstance(cached, str):
                return Path(cached)
            if fetches:
                return Path(hf_hub_download(source, name, revision=revision, etag_timeout=10))
    return None


def _is_hub_id(source: str) -> bool:
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnknown(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnknown(f"{path} is no object")
    return config


def _processor(source: str, revision: str | None, *, fetches: bool = True) -> dict[str, Any]:
    """Return the values of a model's image processor; none if it has no such file."""
    found: dict[str, Any] = {}
    for name in _PROCESSORS:
        if (path := find_file(source, name, revision, fetches=fetches)) is not None:
            config = _config(path)
            inner = config.get("image_processor")
            found |= inner if isinstance(inner, dict) else config
    return found


def _weights_in(folder: Path) -> int | None:
    """Return the bytes of weights; None if some are missing, or they have another format."""
    index = folder / _INDEX
    if index.is_file():
        total = _config(index).get("metadata")
        size = total.get("total_size") if isinstance(total, dict) else None
        return int(size) if size else None
    # `consolidated.safetensors` are the same weights once more.
    files = list(folder.glob("model*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def _fetched(source: str, revision: str | None) -> dict[str, Any]:
    why: Exception | str = "it is neither a folder here nor an id on Hugging Face's hub"
    kind = ModelUnknown if "://" in source else ModelMissing
    if _is_hub_id(source):
        try:
            # It asks once; a download would try for half a minute where there is no network.
            HfApi().model_info(source, revision=revision, timeout=10)
            found = hf_hub_download(source, "config.json", revision=revision, etag_timeout=10)
            return _config(Path(found))
        except HUB_ERRORS as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            # Without an answer, engines on this machine get none either.
            answered = isinstance(error, HfHubHTTPError | HFValidationError)
            missing = isinstance(error, _MISSING) and not _has_another_format(source, revision)
            if answered and not missing:
                kind = ModelUnknown
    raise kind(
        f"config.json of {source!r} cannot be read ({why}); download the model, and give its "
        "folder or its id"
    )


def _has_another_format(source: str, revision: str | None) -> bool:
    try:
        files = HfApi().model_info(source, revision=revision, timeout=10).siblings or []
    except HUB_ERRORS:
        return False
    return any(Path(file.rfilename).match(name) for file in files for name in _OTHER_FORMATS)


def _weights_on_hub(source: str, revision: str | None) -> int | None:
    try:
        found = HfApi().model_info(source, revision=revision, files_metadata=True, timeout=10)
    except HUB_ERRORS:
        # Then parameters are counted from the configuration.
        return None
    files = found.siblings or []
    sizes = [
        file.size or 0
        for file in files
        if file.rfilename.startswith("model") and file.rfilename.endswith(".safetensors")
    ]
    return sum(sizes) or None
