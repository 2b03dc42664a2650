"""Unix time that never jumps."""

import time

_AT_MONOTONIC_ZERO_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Seconds since 1970, as this process's clock had it at its start, and counted on since.

    A machine's clock that is set meanwhile must not end conversations as idle, or make latencies
    of hours. So two processes may differ by as much as it was set; compare readings of one alone.
    """
    return _AT_MONOTONIC_ZERO_S + time.monotonic()
