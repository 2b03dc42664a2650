"""Lists what is served, and by whom."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.workloads import (
    Arrivals,
    Changes,
    Latency,
    Shape,
    Spread,
    Workload,
    recorded,
    synthetic,
)

PROFILE = "h100-qwen3-8b"
_VOCABULARY = range(1_000, 4_000)
# More than begin in any run of a closed loop.
_PROGRAMS, _SESSIONS = 1_000, 1_000


@dataclass(frozen=True, slots=True)
class Contender:
    """A system, and how it is set here.

    Attributes:
        system: its name, as `benchmarks.simulate.run.make_system` knows it.
        options: fields of `benchmarks.simulate.System`.
        host_tokens_each: room in host memory, for each engine; 0: the system's default.
    """

    label: str
    system: str
    options: dict[str, Any] = field(default_factory=dict)
    host_tokens_each: int = 0


# 256 GB: an eighth of the 2 TiB that servers with eight H100s have (AWS's p5.48xlarge), at 147,456
# bytes a token. The default is a third of that.
_HOST_TOKENS = 1_750_000
# Engines that are told of no end keep the KV of conversations that have ended until its room is
# needed, whoever uses them. A turn waits for room for half an hour, as in ThunderAgent.
_ALIKE: dict[str, Any] = {"keeps_ended": True, "queue_timeout_s": 1800.0}

CONTENDERS: tuple[Contender, ...] = tuple(
    replace(one, options=_ALIKE | one.options)
    for one in (
        Contender("vllm", "vllm"),
        Contender("affinity", "affinity"),
        Contender("ttl, 2 s", "ttl"),
        Contender("ttl, 30 s", "ttl", {"ttl_s": 30.0}),
        Contender("attained", "attained"),
        Contender("thunderagent", "thunderagent"),
        Contender("thunderagent, f = 1", "thunderagent", {"discounts": False}),
        Contender("conserve", "conserve"),
        Contender("pausing", "pausing"),
        Contender("parking", "parking"),
        Contender("parking, 256 GB", "parking", host_tokens_each=_HOST_TOKENS),
    )
)


def _coding(tools: Latency) -> Shape:
    """Coding agents, as SWE-agent's on SWE-bench (ThunderAgent, figure 4).

    The paper's text has no lengths (its figures are images): all of these are assumed. They make a
    mean context of some 30,000 tokens, so that 96 programs are twice what four engines of 350,000
    tokens hold, and 24 half.
    """
    return Shape(
        turns=Spread(15, 40, 90),
        first_prompt_tokens=Spread(4_000, 8_000, 16_000),
        append_tokens=Spread(100, 900, 6_000),
        output_tokens=Spread(30, 200, 1_200),
        tool_latency=tools,
    )


def regime(volume_tokens: int) -> Shape:
    """One of MARS's input-length regimes (section 6.1).

    With some 12 turns, of which each adds 700 tokens, they differ in the first prompt alone
    ("primarily in context size rather than [...] task difficulty"). Turns, outputs and tools are
    assumed, and tools take no CPU here.

    Args:
        volume_tokens: of all prompts of a program together, on average.
    """
    first = round((volume_tokens - 66 * 700) / 12)
    return Shape(
        turns=Spread(4, 12, 24),
        first_prompt_tokens=Spread(first // 3, first, 3 * first),
        append_tokens=Spread(100, 500, 3_000),
        output_tokens=Spread(30, 200, 1_200),
        tool_latency=Latency(2.0, 15.0),
    )


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many programs at a time, for so long (ThunderAgent, section 5): one ends, one begins.

    Attributes:
        shape: of drawn programs; None: recorded sessions.
        seconds: how long it lasts; the first third is not counted, and programs begin evenly over
            the first tenth.
    """

    name: str
    shape: Shape | None = None
    seconds: float = 1800.0

    def workload(self, data: Path | None, seed: int) -> Workload:
        """Programs in the order in which they begin.

        Recorded lengths are a quarter, so that a mean context is as long as the drawn ones', and
        gaps at most a minute; sub-agents are programs of their own.
        """
        arrivals = Arrivals("even", 1.0)
        if self.shape is not None:
            return synthetic(
                self.shape,
                conversations=_PROGRAMS,
                arrivals=arrivals,
                vocabulary=_VOCABULARY,
                seed=seed,
            )
        assert data is not None
        return recorded(
            data,
            sessions=_SESSIONS,
            arrivals=arrivals,
            vocabulary=_VOCABULARY,
            changes=Changes(scale_tokens=0.25, max_gap_s=60.0, max_context_tokens=131_072),
            seed=seed,
        )


CLOSED: tuple[ClosedLoop, ...] = (
    # Local, light tools have a low variance; remote services' tails are of tens of seconds and more
    # (ThunderAgent, appendix C). The percentiles are assumed.
    ClosedLoop("quick tools", _coding(Latency(1.0, 3.0))),
    ClosedLoop("remote tools", _coding(Latency(3.0, 60.0))),
    ClosedLoop("recorded"),
)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Programs that arrive at random intervals, whether others have ended or not (MARS, 6.3).

    Attributes:
        programs: how many; all are served to their ends.
    """

    name: str
    shape: Shape
    programs: int = 300

    def workload(self, rate_per_s: float, seed: int) -> Workload:
        """The programs, as they arrive."""
        return synthetic(
            self.shape,
            conversations=self.programs,
            arrivals=Arrivals("poisson", rate_per_s, seed),
            vocabulary=_VOCABULARY,
            seed=seed,
        )


# The means that the paper gives.
REGIMES: tuple[Arriving, ...] = (
    Arriving("ILR-1", regime(125_000)),
    Arriving("ILR-2", regime(167_000)),
    Arriving("ILR-3", regime(220_000)),
    Arriving("ILR-4", regime(263_000)),
)
