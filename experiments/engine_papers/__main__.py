"""See the package: ``python -m experiments.engine_papers``.

Everything is simulated, step by step: vLLM's scheduler, the rules of MARS's baselines, and
ConServe's, on what steps take by data sheets (`benchmarks/simulate/inside/costs.py`).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.progress import Progress

from conserve.console import new_console
from experiments import engine_papers
from experiments.engine_papers import agentserve, claims, mars, show
from experiments.engine_papers.measure import measure

# Mechanisms are left out at these: without admission a run takes a hundred times as long.
_WITHOUT_AT = (
    mars.Point("H100", "ILR-1", 0.5, 40),
    mars.Point("H100", "ILR-3", 0.33, 40),
    mars.Point("H200", "ILR-4", 0.5, 40),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment; the exit status is 0 whatever comes out."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.engine_papers", description=engine_papers.__doc__
    )
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there too")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds: give at least 1")
    seeds = range(options.seeds)
    points = [
        mars.Point(gpu, regime, rate_per_s)
        for gpu in mars.GPUS
        for regime in mars.VOLUMES_TOKENS
        for rate_per_s in mars.RATES_PER_S
    ]
    few = [
        agentserve.Point(gpu, model, paradigm, agents, tools)
        for tools in agentserve.TOOLS
        for gpu in agentserve.GPUS
        for model in agentserve.MODELS
        for paradigm in ("react", "plan-and-execute")
        for agents in agentserve.AGENTS
    ]
    console = new_console(least_width=150)
    left_out = (mars.OURS, *mars.WITHOUT)
    with Progress(console=console, transient=True) as progress:
        count = len(points) * len(mars.SYSTEMS) + len(_WITHOUT_AT) * len(left_out)
        count += len(few) * len(agentserve.SYSTEMS)
        task = progress.add_task("simulating", total=len(seeds) * count)

        def on_run() -> None:
            progress.advance(task)

        served = measure(mars.run, points, mars.SYSTEMS, seeds, on_run)
        without = measure(mars.run, _WITHOUT_AT, left_out, seeds, on_run)
        agents = measure(agentserve.run, few, agentserve.SYSTEMS, seeds, on_run)
    show.show_mars(served, console)
    show.show_without(without, console)
    show.show_agentserve(agents, console)
    show.show_claims(claims.of_mars(served) + claims.of_mars_parts(without), "MARS", console)
    for tools in agentserve.TOOLS:
        with_them = [one for one in agents if one.point.tools == tools]
        listed = claims.of_agentserve(with_them) + claims.of_agentserve_parts(with_them)
        show.show_claims(listed, f"AgentServe, {tools} tools", console)
    if options.json is not None:
        found = {
            "mars": [asdict(one) for one in served],
            "mars, without": [asdict(one) for one in without],
            "agentserve": [asdict(one) for one in agents],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
