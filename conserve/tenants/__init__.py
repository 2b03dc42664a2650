"""API keys, the tenants that they belong to, and tenants' limits and usage."""

from conserve.tenants.keyfile import Caller, Key, KeyFile, KeyFileError, KeyRing, Tenant
from conserve.tenants.limits import Limits, Over, TenantUsage, UsageBook
