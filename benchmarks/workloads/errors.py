"""The one error of a workload that cannot be made as asked."""


class WorkloadError(ValueError):
    """A setting or a file is unusable; the message names it and says why, in one line."""


def require(met: bool, problem: str) -> None:
    """Raise WorkloadError with ``problem`` unless ``met``."""
    if not met:
        raise WorkloadError(problem)
