"""Ray Serve's side: its autoscaler follows what the conversation table wants.

The table sees every signal, so it decides, once a second; each engine hears of it with its beat
and tells Serve (``record_autoscaling_stats``). Serve starts and stops replicas, and Ray's cluster
autoscaler nodes, by their own means.
"""

import time
from typing import Any

# Under these names engines tell Serve how many of their role are wanted, and when the table has
# decided or confirmed that, in Unix time.
WANTED_REPLICAS = "conserve_wanted_replicas"
DECIDED_S = "conserve_wanted_replicas_decided_s"
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
        metrics = context.raw_metrics or {}
        wanted, decided = metrics.get(WANTED_REPLICAS, {}), metrics.get(DECIDED_S, {})
        # Engines hear the table at different moments, and one that is cut off goes on saying what
        # it has heard last: what counts is when the table said it, not when the engine did.
        words = [
            (decided[replica][-1].value, series[-1].value)
            for replica, series in wanted.items()
            if series and decided.get(replica)
        ]
        if not words:
            return context.target_num_replicas, {}
        decided_s, replicas = max(words)
        if time.time() - decided_s > _STALE_S:
            return context.target_num_replicas, {}
        return round(replicas), {}


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
