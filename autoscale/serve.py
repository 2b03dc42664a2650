"""Ray Serve's side: its autoscaler follows what the conversation table wants.

The table sees every signal, so it decides, once a second; each engine hears of it with its beat
and tells Serve (``record_autoscaling_stats``). Serve starts and stops replicas, and Ray's cluster
autoscaler nodes, by their own means.
"""

import time
from typing import Any

# Under this name engines tell Serve how many of their tier are wanted.
WANTED_REPLICAS = "conserve_wanted_replicas"
# Older than this, a table that is down, or engines that are cut off, would be followed.
_STALE_S = 15.0


class FollowTable:
    """A Serve autoscaling policy: as many replicas as the latest word of the table says.

    Without a fresh word everything stays as it is. Serve's own delays and factors have to be off:
    bounds, hysteresis and cool-down are in `autoscale.scaling`.

    Example:
        ``AutoscalingConfig(policy={"policy_function": "autoscale.serve:FollowTable"}, ...)``
    """

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's ``AutoscalingContext`` to a number of replicas, and no state to keep."""
        said = (context.raw_metrics or {}).get(WANTED_REPLICAS, {})
        points = [point for series in said.values() for point in series]
        newest = max(points, key=lambda point: point.timestamp, default=None)
        if newest is None or time.time() - newest.timestamp > _STALE_S:
            return context.target_num_replicas, {}
        return round(newest.value), {}


def serve_options(least: int, most: int) -> dict[str, Any]:
    """A deployment's ``autoscaling_config``, for which the table decides."""
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
