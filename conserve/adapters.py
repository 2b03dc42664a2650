"""LoRA adapters of a model: which there are, and what tells one's KV from that of any other.

Those of the settings stay for as long as the application runs. Those of a file, which `conserve
adapters` changes, come and go. Routers know both, and tell engines of an adapter with each request
for it, so an engine needs only the adapter's folder.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from conserve.followed import Followed

if TYPE_CHECKING:
    from conserve.settings import Settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
CONFIG = "adapter_config.json"
# As many may run in one step; each takes room beside the model's weights.
_LEAST_SLOTS, _MOST_SLOTS = 4, 16
# vLLM's ``MaxLoRARanks``, and its default: one that comes later may have as much.
_RANKS, _LEAST_RANK = (16, 32, 64, 128, 256, 320, 512), 16
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class AdapterError(ValueError):
    """An adapter, or the file of all, cannot be used; the message says why."""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter: the model's name for clients, its folder, and a digest of the files there."""

    name: str
    path: str
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]

    @property
    def id(self) -> str:
        """A name for it and no other, wherever its folder is."""
        return f"{self.name}@{self.digest}"

    @property
    def model(self) -> str:
        """The model that engines are asked for, which says all of the adapter."""
        return f"{self.id}@{self.path}"

    def salt(self, salt: str | None) -> str:
        """Return the salt for KV that a turn with this adapter and another salt, or none, keeps."""
        said = json.dumps([salt, self.name, self.digest])
        return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def number(self) -> int:
        """A number of a conversation's history, for one that is known by its number alone."""
        return int(self.salt(None)[:12], 16)


def of_model(model: str) -> Adapter | None:
    """Return the adapter of which `Adapter.model` is this name; None of any other model's."""
    name, _, rest = model.partition("@")
    digest, mark, path = rest.partition("@")
    return Adapter(name, path, digest) if mark and len(digest) == 64 else None


def adapter_in(name: str, folder: str) -> Adapter:
    """Return a folder's adapter, of which all is read; AdapterError if there is none."""
    check_name(name)
    config_of(Path(folder))
    return Adapter(name, folder, digest_of(Path(folder)))


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise AdapterError(
            f"{name[:64]!r} is no name for an adapter: use up to 128 letters, digits, and . _ : / -"
        )


def digest_of(folder: Path) -> str:
    """Return a digest of an adapter's files; AdapterError if some are missing."""
    whole = hashlib.sha256()
    try:
        weights = [one for one in WEIGHTS if (folder / one).exists()]
        for name in (CONFIG, *(weights or WEIGHTS[:1])):
            with (folder / name).open("rb") as file:
                whole.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise AdapterError(f"{folder / name} cannot be read: {error.strerror}") from None
    return whole.hexdigest()


def config_of(folder: Path) -> dict[str, Any]:
    """Return what an adapter's configuration says; AdapterError if it is not usable."""
    try:
        found = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder / CONFIG} cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("r"), int):
        raise AdapterError(f"{folder / CONFIG} is no LoRA adapter's: it has no rank (r)")
    return found


def with_adapters(settings: "Settings") -> "Settings":
    """Return the settings with what engines need that compute with adapters.

    Raises `AdapterError` if an adapter of now, or the file of all, is not usable.
    """
    if not settings.adapts:
        return settings
    folders, rank = folders_of(settings).values(), _LEAST_RANK
    for folder in folders:
        said = config_of(Path(folder))
        rank = max(rank, said["r"], *(said.get("rank_pattern") or {}).values())
    needed = {
        "enable_lora": True,
        "max_lora_rank": next((one for one in _RANKS if one >= rank), rank),
        "max_loras": min(max(_LEAST_SLOTS, len(folders)), _MOST_SLOTS),
        "max_cpu_loras": 32,
    }
    return settings.model_copy(update={"engine": needed | settings.engine})


class AdapterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    adapters: list[Adapter]


def read(path: Path) -> dict[str, Adapter]:
    """Return a file's adapters, by name; without a file there are none.

    AdapterError if it is not usable.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=AdapterFile)
        for one in found.adapters:
            check_name(one.name)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, AdapterError) as error:
        raise AdapterError(f"the file of adapters {path} is not usable: {error}") from None
    return {one.name: one for one in found.adapters}


def folders_of(settings: "Settings") -> dict[str, str]:
    """Return the folders of all adapters that there are now, by name."""
    file = settings.adapters_file
    known = {} if file is None else read(Path(file))
    return {one.name: one.path for one in known.values()} | settings.adapters


class Adapters:
    """The adapters of a model, for one process; it reads all of those in the settings.

    A name in the file that the settings have, too, is theirs. Raises `AdapterError` if an adapter,
    or the file, is not usable.
    """

    def __init__(self, settings: "Settings", now_s: float) -> None:
        self._fixed = {name: adapter_in(name, path) for name, path in settings.adapters.items()}
        self._file: Followed[dict[str, Adapter]] | None = None
        if settings.adapters_file is not None:
            file = Path(settings.adapters_file)
            self._file = Followed((file,), lambda: read(file) | self._fixed, now_s)

    def all(self, now_s: float) -> dict[str, Adapter]:
        """Return those that there are now, by name."""
        return self._fixed if self._file is None else self._file.says(now_s)
