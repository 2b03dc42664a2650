"""Tool environments: the manager's actor, the sandbox in which commands run, and containers."""
