"""Sets power caps: lowers a GPU's limit for a while, and puts it back whatever happens.

Before a limit is changed, the old one is written to disk; the record is deleted once it is set
again. The kernel releases the lock on the GPU's file with its process, so a lock tells a live
owner's record from a leftover. The next owner undoes leftovers.

A GPU is left alone if no replica of ours uses it, in MIG mode (its instances share the limit), or
under another owner's cap.
"""

import fcntl
import json
import logging
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, Self

from hetero.nvml import Nvml, NvmlError, PowerLimits

logger = logging.getLogger("conserve.power")

DIRECTORY_VARIABLE = "CONSERVE_POWER_DIR"
# Drivers round a limit by at most a watt.
_SAME_W = 1.0


class CapRefused(ValueError):
    """This cap cannot be set; nothing was changed."""


class HasOwner(CapRefused):
    """Another process holds a cap on this GPU; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Cap:
    """A power cap: in watts, or as a fraction of the GPU's default limit (the paper's is 2/3)."""

    watts: float | None = None
    fraction: float | None = None

    def limit_w(self, limits: PowerLimits) -> float:
        """Return the limit in watts, rounded down to a tenth; raises `CapRefused`."""
        wanted = self.watts if self.watts is not None else (self.fraction or 0) * limits.default_w
        if not limits.min_w <= wanted <= limits.max_w:
            raise CapRefused(
                f"a limit of {wanted:g} W is outside of what this GPU allows, "
                f"{limits.min_w:g} to {limits.max_w:g} W (default {limits.default_w:g} W)"
            )
        return max(limits.min_w, int(wanted * 10 + 1e-6) / 10)


@dataclass(frozen=True, slots=True)
class Record:
    """A cap's record on disk: the limit to put back, and those that the owner may have set."""

    previous_w: float
    caps_w: list[float]


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome for a record; ``detail`` says for people what was done and why.

    It is ``restored``, ``changed`` (another limit was set since, and left), ``held`` (its owner
    lives)
    or ``failed`` (the record is kept).
    """

    uuid: str
    outcome: Literal["restored", "changed", "held", "failed"]
    detail: str

    def log(self) -> None:
        level = logging.INFO if self.outcome == "restored" else logging.WARNING
        logger.log(level, "%s: %s: %s", self.uuid, self.outcome, self.detail)


def default_directory() -> Path:
    """Return the folder of records: ``CONSERVE_POWER_DIR``, or root's or the user's state."""
    if given := os.environ.get(DIRECTORY_VARIABLE):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/lib/conserve/power")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "conserve" / "power"


class PowerCaps:
    """The caps that one process holds; a context manager that puts every limit back.

    ``owner`` is a name for messages. ``directory`` has records and locks, and is created if
    missing.
    """

    def __init__(self, nvml: Nvml, owner: str, directory: Path) -> None:
        self._nvml = nvml
        self._owner = owner
        self._directory = directory
        self._locks: dict[str, IO[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for done in self.restore_all():
            done.log()

    @property
    def held(self) -> list[str]:
        return sorted(self._locks)

    def apply(self, uuid: str, cap: Cap, used: Collection[str]) -> float:
        """Set or change a GPU's cap; return the limit that holds, in watts.

        Args:
            used: the GPUs of this application's replicas; others are not capped.

        Raises:
            CapRefused: this GPU may not have the cap; `HasOwner` if another process holds one.
            NvmlError: the limit could not be set (usually `NoPermission`).
            OSError: the record could not be written, so the limit was not changed.
        """
        if uuid not in used:
            raise CapRefused(f"{uuid}: no replica of ConServe uses this GPU, so it is not capped")
        if any(gpu.uuid == uuid and gpu.mig_enabled for gpu in self._nvml.inventory()):
            raise CapRefused(
                f"{uuid}: in MIG mode all instances share the GPU's limit; disable MIG to cap it"
            )
        try:
            limit_w = cap.limit_w(self._nvml.limits(uuid))
        except CapRefused as refused:
            raise CapRefused(f"{uuid}: {refused}") from None
        fresh = uuid not in self._locks
        if fresh:
            self._locks[uuid] = _lock(self._directory, uuid, self._owner)
        try:
            if fresh and _record_path(self._directory, uuid).exists():
                left = _put_back(self._nvml, self._directory, uuid)
                if left.outcome == "failed":
                    raise CapRefused(f"{uuid}: an earlier cap could not be undone: {left.detail}")
            now_w = self._nvml.limit_w(uuid)
            old = _read(self._directory, uuid)
            if old is not None:
                if all(abs(now_w - known_w) > _SAME_W for known_w in old.caps_w):
                    raise HasOwner(f"{uuid}: another program set {now_w:g} W since: kept")
                if old.caps_w == [limit_w]:
                    return now_w
            previous_w = old.previous_w if old else now_w
            # Keep the old cap, as the process may end before the limit changes.
            caps_w = [*(old.caps_w if old else []), limit_w]
            _write(self._directory, uuid, Record(previous_w, caps_w))
            self._nvml.set_limit_w(uuid, limit_w)
            _write(self._directory, uuid, Record(previous_w, [limit_w]))
            return self._nvml.limit_w(uuid)
        except BaseException:
            if fresh:
                self.restore(uuid)
            raise

    def restore(self, uuid: str) -> Restored:
        try:
            return _put_back(self._nvml, self._directory, uuid)
        finally:
            self._locks.pop(uuid).close()

    def restore_all(self) -> list[Restored]:
        return [self.restore(uuid) for uuid in self.held]


def recover(nvml: Nvml, directory: Path) -> list[Restored]:
    """Undo caps whose owners are dead; list those of live owners as ``held``."""
    done = []
    for uuid in sorted(path.stem for path in directory.glob("*.json")):
        try:
            lock = _lock(directory, uuid, "conserve's power guard")
        except HasOwner as owner:
            done.append(Restored(uuid, "held", str(owner)))
            continue
        with lock:
            # Its owner may have deleted it meanwhile.
            if _record_path(directory, uuid).exists():
                done.append(_put_back(nvml, directory, uuid))
    return done


def _put_back(nvml: Nvml, directory: Path, uuid: str) -> Restored:
    try:
        record = _read(directory, uuid)
    except CapRefused as unreadable:
        return Restored(uuid, "failed", str(unreadable))
    if record is None:
        return Restored(uuid, "restored", "nothing had been changed")
    previous_w = record.previous_w
    try:
        now_w = nvml.limit_w(uuid)
        ours = any(abs(now_w - cap_w) <= _SAME_W for cap_w in record.caps_w)
        if ours and now_w != previous_w:
            nvml.set_limit_w(uuid, previous_w)
    except NvmlError as error:
        return Restored(uuid, "failed", f"{error} (to set: {previous_w:g} W)")
    _record_path(directory, uuid).unlink()
    if ours or abs(now_w - previous_w) <= _SAME_W:
        return Restored(uuid, "restored", f"{now_w:g} W before, {previous_w:g} W now")
    return Restored(
        uuid, "changed", f"another program set {now_w:g} W since: kept (it was {previous_w:g} W)"
    )


def _record_path(directory: Path, uuid: str) -> Path:
    return directory / f"{uuid}.json"


def _read(directory: Path, uuid: str) -> Record | None:
    path = _record_path(directory, uuid)
    try:
        found = json.loads(path.read_text())
        return Record(found["previous_w"], found["caps_w"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise CapRefused(
            f"the record {path} cannot be read ({error}): compare the GPU's limit with its "
            "default in `nvidia-smi -q -d POWER`, set it right, and delete the file"
        ) from None


def _write(directory: Path, uuid: str, record: Record) -> None:
    """Write a record, which is wholly on disk when this returns."""
    path = _record_path(directory, uuid)
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(directory: Path, uuid: str, owner: str) -> IO[str]:
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / f"{uuid}.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise HasOwner(f"{uuid}: its power cap belongs to {holder}; end that first") from None
    file.seek(0)
    file.truncate()
    file.write(f"{owner} (process {os.getpid()})")
    file.flush()
    return file
