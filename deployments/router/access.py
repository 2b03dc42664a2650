"""Lets requests in by their keys, where there are any, and by where they come from."""

import time
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from conserve.errors import ApiError
from conserve.settings import Settings, SettingsError
from conserve.tenants import Caller, KeyFileError, KeyRing, keyfile
from deployments.router.guard import is_here
from deployments.router.operators import DASHBOARD_PATHS, HEALTHZ, LIVE, READY

# Load balancers have no key, nor has a browser that opens a page; these tell nothing of tenants.
_OPEN = ("/health", LIVE, READY, HEALTHZ, *DASHBOARD_PATHS)
# They tell of all tenants, and of the machine.
_OPERATORS = ("/metrics", "/metrics/targets", "/v1/engines", "/v1/events")
# It tells of all tenants where there are no keys; with keys, of the caller's.
RECORDING = "/v1/recording"
# Below it are actions on engines, which take a key of an admin wherever there are keys.
_ACTIONS = "/v1/engines/"
_CALLER = "conserve.caller"


class Access:
    """Lets requests in, by the settings; raises `KeyFileError` if their key file is not usable."""

    def __init__(self, settings: Settings) -> None:
        file = settings.keys_file
        self._keys = None if file is None else KeyRing(Path(file), time.monotonic())
        self._open_to_all = settings.unauthenticated

    def admit(self, scope: Scope) -> None:
        """Let a request in, and note its caller; raises `ApiError` without anything of a key."""
        if scope["path"] in _OPEN:
            return
        acts = scope["path"].startswith(_ACTIONS) and scope["path"] != _ACTIONS
        operators = acts or scope["path"] in _OPERATORS
        if self._keys is None:
            own = operators or scope["path"] == RECORDING
            if own and not self._open_to_all and not is_here(scope):
                raise ApiError(
                    403, f"{scope['path']} is for this machine alone", "admin_key_required"
                )
            return
        key = _key(Headers(scope=scope))
        if key is None:
            if operators and not acts and is_here(scope):
                return
            raise ApiError(
                401,
                "an API key is required: send `Authorization: Bearer KEY`, or `x-api-key: KEY`",
                "invalid_api_key",
            )
        caller = self._keys.find(key, time.monotonic())
        if caller is None:
            raise ApiError(401, "the API key is unknown or revoked", "invalid_api_key")
        if operators and not caller.admin and (acts or not is_here(scope)):
            raise ApiError(
                403, f"{scope['path']} is for admin keys, and not this one", "admin_key_required"
            )
        scope[_CALLER] = caller


def require_keys(settings: Settings) -> None:
    """Check the key file, before engines are started in vain; raises `SettingsError`."""
    if settings.keys_file is not None:
        try:
            keyfile.read(Path(settings.keys_file))
        except KeyFileError as error:
            raise SettingsError(f"keys_file: {error}") from None


def caller_of(scope: Scope) -> Caller | None:
    """Return whose key came with a request that was let in; None where there are no keys."""
    caller: Caller | None = scope.get(_CALLER)
    return caller


def tenant_of(scope: Scope) -> str | None:
    """Return the tenant of a request that was let in; None where there are no keys."""
    caller = caller_of(scope)
    return None if caller is None else caller.tenant


def models_of(scope: Scope) -> tuple[str, ...]:
    """Return the models that a request's key is limited to; none: it is for all."""
    caller = caller_of(scope)
    return () if caller is None else caller.models


def _key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None
