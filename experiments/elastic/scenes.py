"""Lists what is served, on which engines, and by whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoscale.capacity.profile import Profile
from benchmarks.records import Answer
from benchmarks.selection import Selection
from benchmarks.simulate.run import EngineCounts
from benchmarks.workloads import Workload

_NOTHING_SAID = Answer("")
# Of a nominal engine: see `session_s`.
_BATCH = 8

ENGINES: dict[str, EngineCounts] = {
    "1:1": EngineCounts(1, 1),
    "1:3": EngineCounts(1, 3),
    "2:6": EngineCounts(2, 6),
}
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.3)
_FEWER = (0.3, 0.7, 1.0, 1.3)
# Placements alone; and with what `conserve serve` starts beside: who is idle makes room, and comes
# back from host memory.
_PLACED = ("conserve", "collocated", "affinity", "elastic")
_PARKING = ("parking", "collocated_parking", "elastic_parking")


@dataclass(frozen=True, slots=True)
class Scene:
    """A workload on engines of one kind.

    Attributes:
        recorded: recorded sessions; else the ConServe paper's conversations.
        scale_tokens: of recorded ones, what their lengths are multiplied by.
        systems: as `benchmarks.simulate.run.make_system` knows them.
        options: fields of `benchmarks.simulate.System`, for all of them.
        engines, loads: prefillers to decoders, and shares of saturation.
    """

    name: str
    profile: str
    conversations: int
    recorded: bool = False
    scale_tokens: float | None = None
    systems: tuple[str, ...] = _PLACED
    options: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = tuple(ENGINES)
    loads: tuple[float, ...] = LOADS

    def selection(self, rate_per_s: float, seed: int, data: Path | None) -> Selection:
        """The conversations."""
        if not self.recorded:
            return Selection("synthetic", self.conversations, rate_per_s=rate_per_s, seed=seed)
        return Selection(
            "recorded",
            self.conversations,
            rate_per_s=rate_per_s,
            seed=seed,
            data=data,
            scale_tokens=self.scale_tokens,
            max_gap_s=60.0,
            max_context_tokens=131_072,
        )


# Conversations wait for room until there is some.
_ENDLESS_LINE = {"queue_limit": 1_000_000, "queue_timeout_s": 1e9}
# A million tokens of KV an engine: 147 GB of host memory.
_HOST_TOKENS = 2_000_000

SCENES: tuple[Scene, ...] = (
    # So many, since of 400 twenty are slower than the p95, and it moves by 8 % with the seed.
    Scene("paper, A40", "a40-qwen3-0.6b", 2_000),
    Scene("paper, H100", "h100-qwen3-8b", 2_000, loads=_FEWER),
    # Affinity turns nobody away, so here nobody else does.
    Scene(
        "paper, A40, endless line",
        "a40-qwen3-0.6b",
        2_000,
        options=_ENDLESS_LINE,
        loads=(0.85, 1.0, 1.3),
    ),
    # The A40 profile's model ends at 32k tokens.
    Scene("recorded, A40", "a40-qwen3-0.6b", 280, True, 0.25, (*_PLACED, *_PARKING), loads=_FEWER),
    Scene("recorded, H100", "h100-qwen3-8b", 280, True, None, (*_PLACED, *_PARKING), loads=_FEWER),
    Scene(
        "recorded, A40, endless line",
        "a40-qwen3-0.6b",
        280,
        recorded=True,
        scale_tokens=0.25,
        options=_ENDLESS_LINE,
        loads=(1.0, 1.3),
    ),
    Scene(
        "recorded, H100, host memory",
        "h100-qwen3-8b",
        140,
        recorded=True,
        systems=("parking", "elastic_parking"),
        options={"host_tokens": _HOST_TOKENS},
        engines=("1:1",),
        loads=(0.3, 0.5, 0.7),
    ),
    Scene(
        "recorded, H100, host memory, longer waits",
        "h100-qwen3-8b",
        140,
        recorded=True,
        systems=("parking", "elastic_parking"),
        options={"host_tokens": _HOST_TOKENS, "queue_timeout_s": 300.0},
        engines=("1:1",),
        loads=(0.5, 0.7),
    ),
)


def session_s(profile: Profile, workload: Workload, *, kv: bool = True) -> float:
    """For how long a conversation keeps a nominal engine, on average.

    That is all its prefills, with what its prompts repeat found, and its decodes at a batch of
    eight; or, if it is longer, the time for which it is there, gaps included, times its share of
    the engine's KV space. So many engines for each of these seconds are saturated.

    Args:
        kv: whether KV space counts: host memory has it between turns where there is much of that.
    """
    busy_s, held_token_s, count = 0.0, 0.0, 0
    prefill, decode = profile.prefill, profile.decode
    for _, script in workload:
        count += 1
        last_tokens = 0
        request = script.next(None)
        while request is not None:
            prompt_tokens, output_tokens = request.prompt_tokens or 0, request.output_tokens or 0
            past = last_tokens if request.reused_tokens is None else request.reused_tokens
            past = past if last_tokens else 0
            prefill_s = prefill.constant_s + prefill.marginal_s(prompt_tokens - past, past)
            held_tokens = prompt_tokens + output_tokens / 2
            decode_s = output_tokens * decode.step_s(_BATCH, _BATCH * held_tokens)
            busy_s += prefill_s + decode_s / _BATCH
            held_token_s += last_tokens * request.gap_s + held_tokens * (prefill_s + decode_s)
            last_tokens = prompt_tokens
            request = script.next(_NOTHING_SAID)
    kv_s = held_token_s / profile.kv_capacity_tokens if kv else 0.0
    return max(busy_s, kv_s) / count
