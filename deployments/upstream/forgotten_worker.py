"""Has a worker register again where its LMCache server may have forgotten it.

The server forgets a worker that is silent for `REAP_TIMEOUT_S`, yet answers its heartbeats, so
LMCache 0.5.6 does not notice: its stores and loads fail from then on.
"""

from time import monotonic
from typing import Any

from deployments.upstream.patch import Patch, of

# LMCache's minimum, and 30 heartbeats (`lmcache.mp.heartbeat_interval`).
REAP_TIMEOUT_S = 30.0


def apply() -> None:
    from lmcache.integration.vllm.vllm_multi_process_adapter import HeartbeatThread
    from lmcache.logging import init_logger

    logger = init_logger(__name__)
    beat: Any = HeartbeatThread._execute

    def beat_and_register(self: Any) -> Any:
        # The silence lasts at most from when the last heartbeat was sent to when this is answered.
        now_s, was_healthy = monotonic(), self._health_event.is_set()
        before_s, self.sent_s = getattr(self, "sent_s", now_s), now_s
        done = beat(self)
        silent_s = monotonic() - before_s
        # Only workers have an id; a server that was lost has LMCache itself register again.
        lives = self._instance_id is not None and was_healthy and self._health_event.is_set()
        if lives and silent_s >= REAP_TIMEOUT_S:
            logger.warning(
                "LMCache's server did not hear from this worker for up to %.0f s and may have "
                "forgotten it: registering again", silent_s,
            )  # fmt: skip
            # After a failure, LMCache tries again at the next heartbeat.
            if not self._recover_callback():
                self._health_event.clear()
        return done

    HeartbeatThread._execute = beat_and_register


PATCH = Patch(
    name="forgotten_worker",
    seams=of(
        "lmcache.integration.vllm.vllm_multi_process_adapter:HeartbeatThread",
        "_execute _health_event _instance_id _recover_callback",
    ),
    why="an engine that was stopped for half a minute stores and loads no KV until it is restarted",
    upstream="LMCache/LMCache#4642 and PR #4687 (restarts of servers; they lack reaped workers)",
    process="connector",
)
