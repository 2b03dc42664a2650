"""Environments in which agents' tools run: what may be asked for, and who holds which.

Pure: what is prepared, run and removed is in `deployments.environments`.
"""

from conserve.environments.ledger import (
    Conflict,
    Environment,
    Ledger,
    QuotaExceeded,
    Quotas,
    Standing,
)
from conserve.environments.spec import Limits, Run, Spec, SpecError

__all__ = [
    "Conflict",
    "Environment",
    "Ledger",
    "Limits",
    "QuotaExceeded",
    "Quotas",
    "Run",
    "Spec",
    "SpecError",
    "Standing",
]
