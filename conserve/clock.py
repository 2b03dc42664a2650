"""Unix time that never jumps."""

import time

_AT_MONOTONIC_ZERO_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Return seconds since 1970 by this process's clock at its start, counted on since.

    If the machine's clock is set, no conversation becomes idle by it. So clocks of two processes
    may differ; compare only readings of one.
    """
    return _AT_MONOTONIC_ZERO_S + time.monotonic()
