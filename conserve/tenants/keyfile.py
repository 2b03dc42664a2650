"""The file of API keys: what is in it, and how it is read and changed.

It holds no key, only SHA-256 digests of keys. They need no salt and no slow hash: a key has 256
random bits, which nobody guesses. The one secret in it is the deployment's, from which prefix
caches' salts are derived; so it is for its owner's eyes only.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from conserve.tenants.limits import Limits

# Tenants beyond those that are named are counted under this name in /metrics.
OTHER_TENANTS = "other"

_NAME = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_KEY = re.compile(r"csk-([0-9a-f]{12})-([0-9a-f]{64})")
_DIGEST = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_LOCK_TIMEOUT_S = 10.0


class KeyFileError(ValueError):
    """The file cannot be used, or not be changed so; the message says why, and holds no secret."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key, as far as it is kept.

    Attributes:
        id: names it in logs; it is the key's middle part.
        tenant: whose it is.
        sha256: digest of the whole key, in hexadecimal.
        created: the day, as in 2026-01-31.
        admin: whether it is for all tenants' conversations, for `/metrics` and for `/v1/engines`.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}$")]
    tenant: str
    sha256: _DIGEST
    created: str
    admin: bool = False


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tenant: whoever has keys.

    Attributes:
        shares_cache: whether it shares prefixes' KV with the other tenants that do. Each of them
            can then tell by its latency what others have sent.
    """

    limits: Limits = msgspec.field(default_factory=Limits)
    shares_cache: bool = False


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is in the file.

    Attributes:
        secret: random, of this deployment, in hexadecimal.
        tenants: by name.
    """

    version: Literal[1]
    secret: _DIGEST
    tenants: dict[str, Tenant]
    keys: list[Key]

    @classmethod
    def new(cls) -> "KeyFile":
        """One without keys, with a secret of its own."""
        return cls(1, secrets.token_hex(32), {}, [])

    def with_key(self, tenant: str, created: str, *, admin: bool = False) -> tuple["KeyFile", str]:
        """The file with one key more, and that key, which cannot be had again.

        Raises:
            KeyFileError: that is no name for a tenant.
        """
        _check_name(tenant)
        key_id, text = new_key()
        key = Key(key_id, tenant, digest(text).hex(), created, admin)
        tenants = {**self.tenants, tenant: self.tenants.get(tenant, Tenant())}
        return msgspec.structs.replace(self, tenants=tenants, keys=[*self.keys, key]), text

    def without_key(self, key_id: str) -> "KeyFile":
        """The file without this key; its tenant stays, with its limits.

        Raises:
            KeyFileError: there is no such key.
        """
        # Somebody may give the whole key.
        whole = _KEY.fullmatch(key_id)
        if whole is not None:
            key_id = whole[1]
        keys = [key for key in self.keys if key.id != key_id]
        if len(keys) == len(self.keys):
            raise KeyFileError(f"no key has the id {key_id[:12]!r}; `conserve keys list` has them")
        return msgspec.structs.replace(self, keys=keys)

    def with_tenant(self, name: str, tenant: Tenant) -> "KeyFile":
        """The file with other limits for a tenant.

        Raises:
            KeyFileError: it is not there.
        """
        if name not in self.tenants:
            raise KeyFileError(f"there is no tenant {name!r}; `conserve keys add {name}` makes one")
        return msgspec.structs.replace(self, tenants={**self.tenants, name: tenant})

    def cache_salt(self, tenant: str) -> str:
        """Return the salt under which vLLM and LMCache keep a tenant's prefixes.

        LMCache 0.5.6 takes 128 characters at most, and not all.
        """
        # No name of a tenant has a colon.
        whose = ":shared" if self.tenants[tenant].shares_cache else tenant
        return hmac.new(bytes.fromhex(self.secret), whose.encode(), hashlib.sha256).hexdigest()


def new_key() -> tuple[str, str]:
    """A fresh key: its id, and all of it, such as ``csk-0f3a5c7e9b1d-...`` with 256 random bits."""
    key_id = secrets.token_hex(6)
    return key_id, f"csk-{key_id}-{secrets.token_hex(32)}"


def digest(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read(path: Path) -> KeyFile:
    """The file's content.

    Raises:
        KeyFileError: there is none, or it is not usable.
    """
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
    """The content of a key file.

    Args:
        path: where it is from, for the error.

    Raises:
        KeyFileError: it is not usable.
    """
    try:
        found = msgspec.json.decode(raw, type=KeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"the key file {path} is not usable: {error}") from None
    for name in found.tenants:
        try:
            _check_name(name)
        except KeyFileError as error:
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
def locked(path: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[Path]:
    """Have no other process change the file meanwhile; yields where it really is.

    Raises:
        KeyFileError: another process changes it for too long, or it cannot be locked.
    """
    path = path.resolve()
    # Not the file itself, which is another after every change.
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"cannot make {path}.lock: {error.strerror}") from None
    try:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise KeyFileError(
                        f"another process has changed {path} for {timeout_s:g} s; try again"
                    ) from None
                time.sleep(0.05)
        yield path
    finally:
        os.close(lock)


def write(path: Path, content: KeyFile) -> None:
    """Put a new file in the old one's place, in one step; only its owner may read it.

    Raises:
        KeyFileError: it cannot be written there; the old one is as it was.
    """
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
