"""Measures how fast the simulator is, and how much memory it takes.

Conversations of the preset ``conserve`` are simulated for a number of turns, on clusters of
several sizes, each in a process of its own, on one core. What is measured is all of it: drawing the
conversations, placing them, the engines, and the metrics.
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import load_profile
from benchmarks.metrics import Tally
from benchmarks.simulate.run import EngineCounts, make_system, serve
from benchmarks.workloads import PRESETS, Arrivals, synthetic
from experiments.harness import Experiment, answer, at_least_1

TARGET_TURNS = 1_000_000
TARGET_S = 120.0
TARGET_BYTES = 10**9

_PROFILE = "a40-qwen3-0.6b"
# A prefiller to three decoders, as in the paper, at four fifths of the prefillers' saturation.
_DECODERS_EACH = 3
_RATE_EACH_PER_S = 1.3
_TURNS_EACH = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One run's time and memory.

    Attributes:
        cpu_s: processor time, workload included; what one core alone would take.
        peak_bytes: the most resident memory, the interpreter's included.
        simulated_s: how long the cluster would have been busy.
    """

    engines: int
    turns: int
    cpu_s: float
    peak_bytes: int
    simulated_s: float

    @property
    def verdict(self) -> str:
        """Whether it meets the target, where it is large enough to say."""
        # The last conversations' lengths decide how many turns they are, to a few in a thousand.
        if self.turns < 0.99 * TARGET_TURNS:
            return "-"
        in_time = self.cpu_s * TARGET_TURNS / self.turns < TARGET_S
        return "[green]met[/]" if in_time and self.peak_bytes < TARGET_BYTES else "[red]missed[/]"


def measure(turns: int, prefillers: int) -> Sample:
    """Simulate about ``turns`` turns on ``prefillers`` times four engines."""
    began_s = time.process_time()
    workload = synthetic(
        PRESETS["conserve"],
        conversations=max(1, turns // _TURNS_EACH),
        arrivals=Arrivals("poisson", _RATE_EACH_PER_S * prefillers),
        vocabulary=range(1_000, 4_000),
    )
    tally = Tally()
    engines = EngineCounts(prefillers, _DECODERS_EACH * prefillers)
    system = make_system("conserve", load_profile(_PROFILE), engines)
    cluster = serve(system, workload, tally.add)
    completed, expected = tally.result().turns["completed"], workload.counts["turns"]
    if completed != expected:
        raise RuntimeError(
            f"{completed} of {expected} turns completed; this measurement means nothing"
        )
    return Sample(
        engines=(1 + _DECODERS_EACH) * prefillers,
        turns=completed,
        cpu_s=time.process_time() - began_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        simulated_s=cluster.ended_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("simulator", __doc__)
    experiment.option(
        "--turns",
        [100_000, 1_000_000],
        "how many, about",
        type=at_least_1,
    )
    about = "with three decoders each"
    experiment.option(
        "--prefillers",
        [1, 10],
        about,
        type=at_least_1,
    )
    experiment.hidden("--measure", type=int)
    options = experiment.parse(arguments)
    if options.measure is not None:
        answer(lambda: measure(options.measure, options.prefillers[0]))
        return
    cases = [(turns, size) for size in options.prefillers for turns in options.turns]
    samples = [
        Sample(**experiment.in_own_process("--measure", turns, "--prefillers", size))
        for turns, size in experiment.track(cases)
    ]
    rows = [
        (
            str(one.engines),
            f"{one.turns:,}",
            f"{one.cpu_s:.1f}",
            f"{one.turns / one.cpu_s:,.0f}",
            f"{one.peak_bytes / 1e6:,.0f}",
            f"{one.simulated_s:,.0f}",
            one.verdict,
        )
        for one in samples
    ]
    columns = ("engines", "turns", "CPU s", "turns/s", "peak MB", "simulated s", "target")
    experiment.show("Simulator, one core", columns, rows, names=0, box=SIMPLE_HEAD)
    experiment.console.print(
        f"Target: {TARGET_TURNS:,} turns in less than {TARGET_S:g} s "
        f"and {TARGET_BYTES / 1e9:g} GB.",
        highlight=False,
    )
    experiment.save(samples)


if __name__ == "__main__":
    main()
