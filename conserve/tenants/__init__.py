"""Knows who may use an application: API keys, the tenants that they belong to, and their limits.

Plain Python with the time as an argument. The file that keys are in is `keyfile`, what a router
asks of each key is `keyring`, and what a tenant has at any moment `usage`.
"""

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
