"""Meters each iteration of an engine in its core, and tells it with vLLM's statistics.

vLLM asks a KV connector at each iteration's beginning for its workers' metadata, and at its end for
statistics, which go to the engine's front with the outputs. Both are vLLM's public interface.
"""

import statistics
from collections import deque
from typing import Any

import msgspec
from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats

from conserve.placement import Step
from conserve.wire import FAILED_IMAGES, OVERDUE, STEPS

# With fewer tokens of prompts, most of an iteration's time is what any iteration costs.
LEAST_PREFILL_TOKENS = 128
# Iterations of decodes are told of together, up to this number and time.
_MOST_DECODES = 64
_TOGETHER_S = 0.25
_LISTS = (STEPS, FAILED_IMAGES, OVERDUE)


class StepStats(LMCacheMPConnectorStats):  # type: ignore[misc]  # LMCache ships no types.
    """The connector's statistics, with iterations, failed images and overdue loads."""

    def is_empty(self) -> bool:
        return bool(super().is_empty()) and not any(self.data.get(name) for name in _LISTS)

    def aggregate(self, other: Any) -> Any:
        super().aggregate(other)
        for name in _LISTS:
            if name in other.data:
                self.data[name] = [*self.data.get(name, ()), *other.data[name]]
        return self


class StepMeter:
    """Meters iterations, of which several may be in flight. Times are of the monotonic clock."""

    def __init__(self, decode_tokens: int = 1) -> None:
        self._decode_tokens = decode_tokens
        # How long a prompt's token took in the last iteration with many; 0 before it.
        self.token_s = 0.0
        # How many embeddings each image has, by request.
        self._images: dict[str, list[int]] = {}
        # When each began, and what it computes; None if nothing.
        self._under_way: deque[tuple[float, Step | None]] = deque()
        self._ended_s = 0.0
        self._decodes: dict[int, list[Step]] = {}
        # Encodes beside iterations, until they are told of.
        self._beside: list[Step] = []
        self._since_s: float | None = None

    def encoded(self, lasted_s: float, tokens: int) -> None:
        """Note an encode beside iterations; it is told of when the next one ends."""
        self._beside.append(Step(lasted_s, 0, 0, 0, 0, encoded_tokens=tokens))

    def began(self, scheduled: Any, now_s: float) -> None:
        self._under_way.append((now_s, self._computes(scheduled)))

    def ended(self, now_s: float) -> list[Step]:
        """Note that the oldest iteration ends; returns those that are told of now."""
        told, self._beside = self._beside, []
        if not self._under_way:
            return told
        began_s, step = self._under_way.popleft()
        # With two in flight the second begins when the first has ended.
        lasted_s = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if step is not None:
            step = msgspec.structs.replace(step, lasted_s=lasted_s)
            if step.new_tokens >= LEAST_PREFILL_TOKENS:
                self.token_s = lasted_s / step.new_tokens
            if step.new_tokens or step.encoded_tokens:
                told.append(step)
            else:
                self._decodes.setdefault(step.decodes, []).append(step)
                if self._since_s is None:
                    self._since_s = now_s
        waiting = sum(map(len, self._decodes.values()))
        due = self._since_s is not None and now_s - self._since_s >= _TOGETHER_S
        if waiting and (told or due or waiting >= _MOST_DECODES):
            told += [_together(alike) for alike in self._decodes.values()]
            self._decodes.clear()
            self._since_s = None
        return told

    def _computes(self, scheduled: Any) -> Step | None:
        new_tokens = pairs = decodes = kv_tokens = 0
        encoded_tokens = self._encodes(scheduled)
        cached = scheduled.scheduled_cached_reqs
        requests = [(one.req_id, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
        requests += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, before in requests:
            tokens = scheduled.num_scheduled_tokens.get(request_id, 0)
            if tokens > self._decode_tokens:
                new_tokens += tokens
                pairs += tokens * (tokens + 2 * before)
            elif tokens:
                decodes += 1
                kv_tokens += before
        if not new_tokens and not decodes:
            return None
        return Step(0.0, new_tokens, pairs, decodes, kv_tokens, encoded_tokens=encoded_tokens)

    def _encodes(self, scheduled: Any) -> int:
        """Return how many embeddings of images the iteration computes."""
        for one in scheduled.scheduled_new_reqs:
            if one.mm_features:
                each = [image.mm_position.get_num_embeds() for image in one.mm_features]
                self._images[one.req_id] = each
        encoded: dict[str, list[int]] = scheduled.scheduled_encoder_inputs
        found = sum(self._images[id][index] for id, images in encoded.items() for index in images)
        for id in scheduled.finished_req_ids:
            self._images.pop(id, None)
        return found


def _together(alike: list[Step]) -> Step:
    """Return the median of iterations, since few of them were held up by something else."""
    lasted_s = statistics.median(one.lasted_s for one in alike)
    kv_tokens = sum(one.kv_tokens for one in alike) // len(alike)
    return Step(lasted_s, 0, 0, alike[0].decodes, kv_tokens, len(alike))
