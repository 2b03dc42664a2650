"""Environments in which agents' tools run: what may be asked for, and which conversation has
which.
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
