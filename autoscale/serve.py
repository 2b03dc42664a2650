"""Has Ray Serve's autoscaler follow the conversation table.

The table decides once a second. Each engine hears of it with its beat and tells Serve
(``record_autoscaling_stats``), which starts and stops replicas.
"""

import time
from typing import Any

# Names under which engines tell Serve how many of their role are wanted, and when the table said so
# (Unix time).
WANTED_REPLICAS = "conserve_wanted_replicas"
DECIDED_S = "conserve_wanted_replicas_decided_s"
# An older decision is of a table that is down, or from engines that are cut off.
_STALE_S = 15.0


class FollowTable:
    """A Serve autoscaling policy: the number of replicas that the table has decided last.

    Serve's own delays and factors have to be off, since `autoscale.autoscaler` has them.
    """

    def __init__(self) -> None:
        # The replica that has told of it may have gone since, and others tell of earlier ones.
        self._last = (0.0, 0.0)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.raw_metrics or {}
        wanted, decided = metrics.get(WANTED_REPLICAS, {}), metrics.get(DECIDED_S, {})
        # Engines that are cut off repeat an old decision, so the table's time counts.
        words = [
            (decided[replica][-1].value, series[-1].value)
            for replica, series in wanted.items()
            if series and decided.get(replica)
        ]
        decided_s, replicas = self._last = max([self._last, *words])
        if time.time() - decided_s > _STALE_S:
            return context.target_num_replicas, {}
        return round(replicas), {}


def serve_options(least: int, most: int) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "max_replicas": most,
        "initial_replicas": least,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "metrics_interval_s": 1,
        "look_back_period_s": 5,
        "policy": {"policy_function": "autoscale.serve:FollowTable"},
    }
