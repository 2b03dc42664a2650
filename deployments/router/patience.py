"""Refusals that took long to find come later: who sends such requests has fewer of them looked at.

A request that is refused takes time of the threads and cores that everybody's tokens come from. One
that took little is answered at once; of others the sender waits for several times as long, so that
of a connection on which nothing but the worst is sent, a third or less is looked at.
"""

import asyncio
import time

from conserve.errors import ApiError

_FREE_S = 0.025
_TIMES = 4
_LONGEST_S = 4.0
_ABOUT_THE_REQUEST = (400, 413, 422)
# Every decoder was asked.
_SEARCHED_FOR = ("previous_response_not_found", "response_not_found")


def wait_s(took_s: float) -> float:
    """How long to hold back a refusal that was found in so much time."""
    return min(_LONGEST_S, _TIMES * max(0.0, took_s - _FREE_S))


async def hold_back(error: ApiError, arrived_s: float) -> None:
    """Wait before a request is refused, where it was its own fault.

    Args:
        arrived_s: when it came, by `time.perf_counter`.
    """
    if error.status in _ABOUT_THE_REQUEST or error.code in _SEARCHED_FOR:
        await asyncio.sleep(wait_s(time.perf_counter() - arrived_s))
