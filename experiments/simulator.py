"""How fast the simulator is, and how much memory it takes.

``python -m experiments.simulator`` simulates conversations of the preset ``conserve``
until so many turns are over, on clusters of several sizes, each in a process of its own, on one
core. What is measured is all of it: drawing the conversations, placing them, the engines, and the
metrics.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autoscale.capacity.profile import load_profile
from benchmarks.metrics import Tally
from benchmarks.simulate.run import EngineCounts, make_system, serve
from benchmarks.workloads import PRESETS, Arrivals, synthetic
from conserve.console import new_console

TARGET_TURNS = 1_000_000
TARGET_S = 120.0
TARGET_BYTES = 10**9

_PROFILE = "a40-qwen3-0.6b"
# A prefiller to three decoders, as in the paper, at four fifths of the prefillers' saturation.
_DECODERS_EACH = 3
_RATE_EACH_PER_S = 1.3
_TURNS_EACH = 10


@dataclass(frozen=True, slots=True)
class SimulatorSample:
    """Tells what one run took.

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


def measure(turns: int, prefillers: int) -> SimulatorSample:
    """Simulate about so many turns on ``prefillers`` times four engines."""
    began_s = time.process_time()
    profile = load_profile(_PROFILE)
    workload = synthetic(
        PRESETS["conserve"],
        conversations=max(1, turns // _TURNS_EACH),
        arrivals=Arrivals("poisson", _RATE_EACH_PER_S * prefillers),
        vocabulary=range(1_000, 4_000),
    )
    tally = Tally()
    engines = EngineCounts(prefillers, _DECODERS_EACH * prefillers)
    cluster = serve(make_system("conserve", profile, engines), workload, tally.add)
    completed = tally.result().turns["completed"]
    if completed != workload.counts["turns"]:
        raise RuntimeError(
            f"{completed} of {workload.counts['turns']} turns completed; this measurement means "
            "nothing"
        )
    return SimulatorSample(
        engines=(1 + _DECODERS_EACH) * prefillers,
        turns=completed,
        cpu_s=time.process_time() - began_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        simulated_s=cluster.ended_s,
    )


def run(turns: Sequence[int], prefillers: Sequence[int], console: Console) -> list[SimulatorSample]:
    """Measure every size on every cluster, one after the other."""
    cases = [(count, size) for size in prefillers for count in turns]
    samples = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(count for count, _ in cases))
        for count, size in cases:
            progress.update(task, description=f"{count:,} turns, {4 * size} engines")
            samples.append(_in_own_process(count, size))
            progress.advance(task, count)
    return samples


def _in_own_process(turns: int, prefillers: int) -> SimulatorSample:
    command = [sys.executable, "-m", "experiments.simulator", "--measure", str(turns)]
    command += ["--prefillers", str(prefillers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600)
    return SimulatorSample(**json.loads(done.stdout))


def show(samples: Sequence[SimulatorSample], console: Console) -> None:
    """Print the figures, and the verdict on the target where a sample is large enough."""
    table = Table(title="Simulator, one core", box=SIMPLE_HEAD)
    for heading in ("engines", "turns", "CPU s", "turns/s", "peak MB", "simulated s", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    for sample in samples:
        table.add_row(
            str(sample.engines),
            f"{sample.turns:,}",
            f"{sample.cpu_s:.1f}",
            f"{sample.turns / sample.cpu_s:,.0f}",
            f"{sample.peak_bytes / 1e6:,.0f}",
            f"{sample.simulated_s:,.0f}",
            _verdict(sample),
        )
    console.print(table)
    console.print(
        f"Target: {TARGET_TURNS:,} turns in less than {TARGET_S:g} s "
        f"and {TARGET_BYTES / 1e9:g} GB.",
        highlight=False,
    )


def _verdict(sample: SimulatorSample) -> str:
    # The last conversations' lengths decide how many turns they are, to a few in a thousand.
    if sample.turns < 0.99 * TARGET_TURNS:
        return "-"
    in_time = sample.cpu_s * TARGET_TURNS / sample.turns < TARGET_S
    return "[green]met[/]" if in_time and sample.peak_bytes < TARGET_BYTES else "[red]missed[/]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; the exit status is 0 whatever the verdict."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--turns", type=int, nargs="+", default=(100_000, 1_000_000), metavar="N",
        help="about so many (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prefillers", type=int, nargs="+", default=(1, 10), metavar="N",
        help="with three decoders each (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    parser.add_argument("--measure", type=int, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.prefillers) < 1 or min(options.turns) < 1:
        parser.error("turns and prefillers must be at least 1")
    if options.measure is not None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps(asdict(measure(options.measure, options.prefillers[0]))))
        return
    console = new_console(least_width=100)
    samples = run(options.turns, options.prefillers, console)
    show(samples, console)
    if options.json is not None:
        found = {"samples": [asdict(sample) for sample in samples]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
