"""Finds callers by their keys, and reads the key file again when it changes."""

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from conserve.tenants import keyfile
from conserve.tenants.keyfile import KeyFile, KeyFileError
from conserve.tenants.limits import Limits

logger = logging.getLogger("ray.serve")

# The file is looked at no more often.
LOOK_S = 1.0

_Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request's key.

    Attributes:
        key_id: names the key in logs.
        admin: whether it may see and end all tenants' conversations.
        cache_salt: what the tenant's prefixes are stored under.
    """

    key_id: str
    tenant: str
    admin: bool
    limits: Limits
    cache_salt: str


class KeyRing:
    """Finds callers by their keys. A file that breaks leaves the keys of the last good one.

    Raises:
        KeyFileError: the file is missing, or not usable.
    """

    def __init__(self, path: Path, now_s: float) -> None:
        self._path = path
        self._looked_s = now_s
        # Before the file is read, so that a change in between is noticed.
        self._version = _version(path)
        self._callers = _callers(keyfile.read(path))
        _warn_if_open(path)

    def find(self, key: str, now_s: float) -> Caller | None:
        """Return the owner of a key; None if it is not valid (any more).

        Keys are looked up by their digests, so the time taken says nothing about any key.
        """
        self._refresh(now_s)
        return self._callers.get(keyfile.digest(key))

    def _refresh(self, now_s: float) -> None:
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._callers = _callers(keyfile.read(self._path))
        except KeyFileError as error:
            logger.error("%s; the keys of before stay good", error)
            return
        logger.info("the key file %s has changed: %d keys", self._path, len(self._callers))
        _warn_if_open(self._path)


def _callers(file: KeyFile) -> dict[bytes, Caller]:
    return {
        bytes.fromhex(key.sha256): Caller(
            key.id,
            key.tenant,
            key.admin,
            file.tenants[key.tenant].limits,
            file.cache_salt(key.tenant),
        )
        for key in file.keys
    }


def _version(path: Path) -> _Version | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _warn_if_open(path: Path) -> None:
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return
    if mode & 0o077:
        logger.warning("the key file %s is open to others (%o); chmod 600 it", path, mode)
