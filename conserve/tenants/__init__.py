"""API keys, the tenants that they belong to, and tenants' limits and usage."""

from conserve.tenants.keyfile import Key, KeyFile, KeyFileError, Tenant
from conserve.tenants.keyring import Caller, KeyRing
from conserve.tenants.limits import Limits, Over
from conserve.tenants.usage import TenantUsage, UsageBook

__all__ = [
    "Caller",
    "Key",
    "KeyFile",
    "KeyFileError",
    "KeyRing",
    "Limits",
    "Over",
    "Tenant",
    "TenantUsage",
    "UsageBook",
]
