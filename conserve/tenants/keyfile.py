"""Reads and changes the file of API keys, and finds callers by their keys.

The file holds only SHA-256 digests of keys. They need no salt and no slow hash, since a key has 256
random bits. It has one secret, from which prefix caches' salts are derived, so only its owner may
read it.
"""

import codecs
import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from conserve.followed import Followed
from conserve.tenants.limits import Limits

# Tenants beyond those that are named are counted under this name in /metrics.
OTHER_TENANTS = "other"

_NAME = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_KEY = re.compile(r"csk-([0-9a-f]{12})-([0-9a-f]{64})")
_DIGEST = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_LOCK_TIMEOUT_S = 10.0


class KeyFileError(ValueError):
    """The file cannot be used, or not changed so; the message says why, and holds no secret."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key, without its secret part; ``id`` names it in logs.

    An admin's is for all tenants' conversations, for `/metrics` and for `/v1/engines`. Turns with a
    ``background`` key wait for those that are not in the background. ``models``, if there are any,
    are all that it is for.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}$")]
    tenant: str
    sha256: _DIGEST
    created: str
    admin: bool = False
    background: bool = False
    models: tuple[str, ...] = ()


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An owner of keys.

    Tenants that share their cache can tell by its latency what others of these have sent. All
    turns of a ``background`` tenant are in the background. ``weight`` is its share of service.
    """

    limits: Limits = msgspec.field(default_factory=Limits)
    shares_cache: bool = False
    background: bool = False
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file; ``secret`` is this deployment's."""

    version: Literal[1]
    secret: _DIGEST
    tenants: dict[str, Tenant]
    keys: list[Key]

    @classmethod
    def new(cls) -> "KeyFile":
        return cls(1, secrets.token_hex(32), {}, [])

    def with_key(
        self,
        tenant: str,
        created: str,
        *,
        admin: bool = False,
        background: bool = False,
        models: tuple[str, ...] = (),
    ) -> tuple["KeyFile", str]:
        """Return the file with one more key, and that key, which is kept nowhere."""
        _check_name(tenant)
        key_id, text = new_key()
        key = Key(key_id, tenant, digest(text).hex(), created, admin, background, models)
        tenants = {**self.tenants, tenant: self.tenants.get(tenant, Tenant())}
        return msgspec.structs.replace(self, tenants=tenants, keys=[*self.keys, key]), text

    def without_key(self, key_id: str) -> "KeyFile":
        """Return the file without this key, whose tenant stays; KeyFileError if there is none."""
        # The whole key is accepted, too.
        if whole := _KEY.fullmatch(key_id):
            key_id = whole[1]
        keys = [key for key in self.keys if key.id != key_id]
        if len(keys) == len(self.keys):
            raise KeyFileError(f"no key has the id {key_id[:12]!r}; `conserve keys list` has them")
        return msgspec.structs.replace(self, keys=keys)

    def with_tenant(self, name: str, tenant: Tenant) -> "KeyFile":
        """Return the file with other settings for a tenant; KeyFileError if there is none."""
        if name not in self.tenants:
            raise KeyFileError(f"there is no tenant {name!r}; `conserve keys add {name}` makes one")
        return msgspec.structs.replace(self, tenants={**self.tenants, name: tenant})

    def cache_salt(self, tenant: str) -> str:
        """Return the salt under which vLLM and LMCache keep a tenant's prefixes.

        LMCache 0.5.6 takes at most 128 characters, and not all.
        """
        # No tenant's name has a colon.
        whose = ":shared" if self.tenants[tenant].shares_cache else tenant
        return hmac.new(bytes.fromhex(self.secret), whose.encode(), hashlib.sha256).hexdigest()


def new_key() -> tuple[str, str]:
    """Return a new key's id, and the key, with 256 random bits."""
    key_id = secrets.token_hex(6)
    return key_id, f"csk-{key_id}-{secrets.token_hex(32)}"


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read(path: Path) -> KeyFile:
    """Return the file's content; KeyFileError if there is none, or it is not usable."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise KeyFileError(
            f"there is no key file {path}; `conserve keys add TENANT --file {path}` makes one"
        ) from None
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error.strerror}") from None
    return parsed(raw, path)


def parsed(raw: bytes, path: Path) -> KeyFile:
    """Parse a key file that came from ``path``; KeyFileError if it is not usable."""
    try:
        found = msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8), type=KeyFile)
        for name in found.tenants:
            _check_name(name)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyFileError) as error:
        raise KeyFileError(f"the key file {path} is not usable: {error}") from None
    ids = set()
    for key in found.keys:
        if key.tenant not in found.tenants:
            raise KeyFileError(f"the key file {path} has no tenant {key.tenant!r}, of a key in it")
        if key.id in ids:
            raise KeyFileError(f"the key file {path} has two keys with the id {key.id}")
        ids.add(key.id)
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Have no other process change the file meanwhile; yields its real path."""
    path = path.resolve()
    # Not the file itself, which every change replaces.
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"cannot make {path}.lock: {error.strerror}") from None
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise KeyFileError(
                        f"another process has changed {path} for {_LOCK_TIMEOUT_S:g} s; try again"
                    ) from None
                time.sleep(0.05)
        yield path
    finally:
        os.close(lock)


def write(path: Path, content: msgspec.Struct) -> None:
    """Replace the file in one step; only its owner may read it."""
    try:
        # mkstemp makes it with mode 0600.
        handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from None


def _check_name(tenant: str) -> None:
    if not re.fullmatch(_NAME, tenant) or tenant == OTHER_TENANTS:
        raise KeyFileError(
            f"{tenant[:64]!r} is no name for a tenant: use up to 63 lower-case letters, digits, "
            f"and . _ - in between, and not {OTHER_TENANTS!r}"
        )


logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request's key."""

    tenant: str
    admin: bool
    limits: Limits
    cache_salt: str
    background: bool = False
    weight: int = 1
    models: tuple[str, ...] = ()


class KeyRing:
    """Finds callers by their keys."""

    def __init__(self, path: Path, now_s: float) -> None:
        self._file = Followed((path,), lambda: _callers_in(path), now_s)

    def find(self, key: str, now_s: float) -> Caller | None:
        """Return the owner of a key; None if it is not valid (any more).

        Keys are looked up by their digests, so the time taken says nothing about any key.
        """
        return self._file.says(now_s).get(digest(key))


def _callers_in(path: Path) -> dict[bytes, Caller]:
    callers = _callers(read(path))
    _warn_if_open(path)
    return callers


def _callers(file: KeyFile) -> dict[bytes, Caller]:
    return {
        bytes.fromhex(key.sha256): Caller(
            key.tenant, key.admin, tenant.limits, file.cache_salt(key.tenant),
            key.background or tenant.background, tenant.weight, key.models,
        )
        for key in file.keys
        for tenant in [file.tenants[key.tenant]]
    }  # fmt: skip


def _warn_if_open(path: Path) -> None:
    with contextlib.suppress(OSError):
        if (mode := stat.S_IMODE(os.stat(path).st_mode)) & 0o077:
            logger.warning("the key file %s is open to others (%o); chmod 600 it", path, mode)
