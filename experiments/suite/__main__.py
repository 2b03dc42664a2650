"""Compares ConServe with its peers on one machine: the same engines, conversations and arrivals.

    make bench DATA=traces    # recorded agent sessions
    make bench                # synthetic ones, as the paper's

ConServe comes first: it gives the unloaded reference that all bounds are relative to, and the
highest rate: how many first turns a second its prefiller gets done, one after the other. Every
system then gets the same conversations at shares of that rate, the last of them the whole of it,
with evenly spaced arrivals, as the paper's saturation point has it (section 5.2).

What a machine does besides drifts by more than systems differ, so they take turns in random order.
As many as memory has room for are up at the same time, and rounds of conversations alternate; where
not even two are, systems are started one after the other, several times over. Ratios are within a
round, or within one start of each, against ConServe (or ``--against``).

It ends with tables for each rate, ``results.md`` with the same, and pictures.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conserve_lab.client import EndpointError
from conserve_lab.peers import Options, PeerUnavailable
from conserve_lab.plots import draw_all, draw_ratios
from conserve_lab.selection import Selection
from conserve_lab.workloads import WorkloadError
from experiments.harness import Experiment, at_least_1, numbers
from experiments.suite.fleet import FIRST, SYSTEMS, Fleet, names, variants
from experiments.suite.results import results
from experiments.suite.turns import Comparing, Measured, Plan, Unavailable


def main(arguments: Sequence[str] | None = None) -> None:
    begun_s = time.monotonic()
    experiment = Experiment("suite", __doc__, rounds=5, seed=0, data=True, cores=True)
    experiment.parser.set_defaults(out=Path("bench-results/suite"))
    option = experiment.option
    option("--systems", ",".join(SYSTEMS), "which systems to measure, with commas between")
    option("--conversations", 12, "in a round", type=at_least_1)
    option("--against", FIRST, "the system that ratios are to (of per_turn: per_turn-10)")
    option("--shares", "0.5,1.0", "rates, as rising shares of the highest that the prefiller "
           "sustains", type=numbers)  # fmt: skip
    option("--rates", None, "rates in conversations a second, in place of --shares; conserve is "
           "measured only if it is among --systems then, and bounds come from the system that "
           "ratios are to", type=numbers)  # fmt: skip
    option("--engines", 2, "engine replicas of each system")
    option("--wrong-decision-rates", "0.1", "shares of wrong decisions; per_turn is measured with "
           "each (per_turn-10: 0.1)", type=numbers)  # fmt: skip
    option("--chunk-tokens", None, "most tokens of an engine's step (collocated)", type=int)
    option("--scale-tokens", None, "multiply lengths by this (default: 0.02 for recorded sessions, "
           "else 0.15)", type=float)  # fmt: skip
    option("--scale-gaps", 0.02, "multiply the gaps between turns by this")
    option("--max-gap", 1.0, "cut longer recorded gaps down to this, in seconds")
    option("--max-turns", 15, "leave recorded sessions with more turns out")
    option("--vocabulary", "1000:4000", "see conserve bench run")
    option("--model", "embedded", "path or id of the model")
    options = experiment.parse(arguments)

    def tell(text: str) -> None:
        experiment.console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    try:
        text = _measure(_plan(options), tell)
    except (WorkloadError, ValueError, OSError) as error:
        experiment.fail(error, status=2)
    except (PeerUnavailable, EndpointError) as error:
        experiment.fail(error, status=1)
    experiment.console.print(text, markup=False, highlight=False, soft_wrap=True)
    minutes = (time.monotonic() - begun_s) / 60
    where = f"{minutes:.1f} minutes; reports and pictures are in {options.out}"
    experiment.console.print(where, highlight=False)


def _plan(options: argparse.Namespace) -> Plan:
    """Return what the options say to measure.

    Raises:
        ValueError: they contradict each other.
        WorkloadError: there are no such conversations.
        OSError: the folder for results cannot be made.
    """
    data, rates_per_s = options.data, options.rates or ()
    if options.engines < 2:
        raise ValueError(f"engines: {options.engines} is too few; give at least 2")
    peers = Options(
        engines=options.engines,
        model=options.model,
        cores=None if options.cores is None else tuple(int(core) for core in options.cores),
        chunk_tokens=options.chunk_tokens,
    )
    selection = Selection(
        kind="recorded" if data else "synthetic",
        conversations=options.conversations,
        pattern="even",
        seed=options.seed,
        data=data,
        preset=None if data else "conserve",
        vocabulary=options.vocabulary,
        scale_tokens=options.scale_tokens or (0.02 if data else 0.15),
        scale_gaps=options.scale_gaps,
        max_gap_s=options.max_gap if data else None,
        max_turns=options.max_turns if data else None,
        max_context_tokens=16_000,
    )
    systems = names(options.systems, alone=bool(rates_per_s))
    chosen = variants(systems, options.wrong_decision_rates, peers)
    if options.against not in (one.name for one in chosen):
        known = ", ".join(one.name for one in chosen)
        raise ValueError(f"against: {options.against} is not among {known}")
    selection.workload()
    options.out.mkdir(parents=True, exist_ok=True)
    loads = () if rates_per_s else options.shares
    return Plan(chosen, options.against, loads, selection, options.rounds, options.out, rates_per_s)


def _measure(plan: Plan, tell: Callable[[str], None]) -> str:
    """Measure all, and write what comes of it whenever there is more: a stop loses nothing."""
    groups: dict[int, Measured] = {}
    missing: list[Unavailable] = []
    text = ""
    with Fleet(plan.out, tell) as fleet:
        for found in Comparing(plan, fleet, tell).run():
            if isinstance(found, Unavailable):
                missing.append(found)
            else:
                groups[found.group] = found
            text = results(groups.values(), missing)
            (plan.out / "results.md").write_text(text + "\n")
    for number, group in groups.items():
        _draw(group, plan.out if number == 1 else plan.out / f"group-{number}")
    return text


def _draw(group: Measured, folder: Path) -> None:
    reports = [report for of_rate in group.reports for report in of_rate]
    draw_all(reports, [f"{r.system} at {r.rate_per_s:.3g}/s" for r in reports], folder)
    for of_rate, comparisons in zip(group.reports, group.comparisons(), strict=True):
        ending = f"-at-{of_rate[0].rate_per_s:.3g}" if len(group.reports) > 1 else ""
        draw_ratios(comparisons, folder, ending)


if __name__ == "__main__":
    main()
