"""Compares ConServe with its peers on one machine: the same engines, conversations and arrivals.

    python -m experiments.suite --data traces    # recorded agent sessions
    python -m experiments.suite                  # synthetic ones, as the paper's

ConServe comes first: it gives the unloaded reference that all bounds are relative to, and the
highest rate: how many first turns a second its prefiller gets done, one after the other. Every
system then gets the same conversations at shares of that rate, the last of them the whole of it,
with evenly spaced arrivals, as the paper's saturation point has it (section 5.2).

What a machine does besides drifts by more than systems differ, so they take turns in random order.
As many as memory has room for are up at the same time, and rounds of conversations alternate; where
not even two are, systems are started one after the other, several times over. Ratios are to
ConServe (or to ``--against``) within a round, or within one start of each.

It ends with tables for each rate, ``results.md`` with the same, and pictures.
"""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from benchmarks.client import EndpointError
from benchmarks.peers import Options, PeerUnavailable
from benchmarks.peers.pinning import autogroup_warning
from benchmarks.plots import draw_all, draw_ratios
from benchmarks.selection import Selection
from benchmarks.workloads import WorkloadError
from conserve.console import new_console
from experiments.suite.fleet import Fleet
from experiments.suite.results import results
from experiments.suite.systems import FIRST, SYSTEMS, names, numbers, variants
from experiments.suite.turns import Comparing, Measured, Plan, Unavailable

console = new_console()
cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def main(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of recorded sessions; without it they are synthetic."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything that comes of it.")] = Path(
        "bench-results/suite"
    ),
    systems: Annotated[
        str, typer.Option(help="Which systems to measure, with commas between.")
    ] = ",".join(SYSTEMS),
    conversations: Annotated[int, typer.Option(help="Conversations in a round.", min=1)] = 12,
    rounds: Annotated[
        int, typer.Option(help="Rounds, or starts, of each system at each rate.", min=1)
    ] = 5,
    against: Annotated[
        str, typer.Option(help="The system that ratios are to (of per_turn: per_turn-10).")
    ] = FIRST,
    shares: Annotated[
        str,
        typer.Option(help="Rates, as rising shares of the highest that the prefiller sustains."),
    ] = "0.5,1.0",
    rates: Annotated[
        str | None,
        typer.Option(
            help="Rates in conversations a second, in place of --shares; conserve is measured only "
            "if it is among --systems then, and bounds come from the system that ratios are to."
        ),
    ] = None,
    engines: Annotated[int, typer.Option(help="Engine replicas of each system.", min=2)] = 2,
    cores: Annotated[
        str | None, typer.Option(metavar="0,1", help="Cores to pin engines to, one each.")
    ] = None,
    wrong_decision_rates: Annotated[
        str,
        typer.Option(
            help="Shares of wrong decisions; per_turn is measured with each (per_turn-10: 0.1)."
        ),
    ] = "0.1",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an engine's step (collocated).")
    ] = None,
    scale_tokens: Annotated[
        float | None,
        typer.Option(
            help="Multiply lengths by this (default: 0.02 for recorded sessions, else 0.15)."
        ),
    ] = None,
    scale_gaps: Annotated[
        float, typer.Option(help="Multiply the gaps between turns by this.")
    ] = 0.02,
    max_gap: Annotated[
        float, typer.Option(help="Cut longer recorded gaps down to this, in seconds.")
    ] = 1.0,
    max_turns: Annotated[
        int, typer.Option(help="Leave recorded sessions with more turns out.")
    ] = 15,
    vocabulary: Annotated[str, typer.Option(help="See conserve bench run.")] = "1000:4000",
    model: Annotated[str, typer.Option(help="Path or id of the model.")] = "embedded",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")] = 0,
) -> None:
    """Measure each system and compare them."""
    begun_s = time.monotonic()
    try:
        loads = [] if rates else numbers("shares", shares)
        rates_per_s = numbers("rates", rates) if rates else []
        wrong_rates = numbers("wrong-decision-rates", wrong_decision_rates)
        options = Options(
            engines=engines,
            model=model,
            cores=None if cores is None else tuple(int(core) for core in cores.split(",")),
            chunk_tokens=chunk_tokens,
        )
        selection = Selection(
            kind="recorded" if data else "synthetic",
            conversations=conversations,
            pattern="even",
            seed=seed,
            data=data,
            preset=None if data else "conserve",
            vocabulary=vocabulary,
            scale_tokens=scale_tokens or (0.02 if data else 0.15),
            scale_gaps=scale_gaps,
            max_gap_s=max_gap if data else None,
            max_turns=max_turns if data else None,
            max_context_tokens=16_000,
        )
        chosen = variants(names(systems, alone=bool(rates_per_s)), wrong_rates, options)
        if against not in (one.name for one in chosen):
            raise ValueError(f"against: {against} is not among {', '.join(v.name for v in chosen)}")
        selection.workload()
        out.mkdir(parents=True, exist_ok=True)
        plan = Plan(chosen, against, loads, selection, rounds, out, rates_per_s)
        if cores is not None and (problem := autogroup_warning()):
            console.print(f"[yellow]{problem}[/yellow]", highlight=False)
        _measure(plan)
    except (WorkloadError, ValueError, OSError) as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(2) from None
    except (PeerUnavailable, EndpointError) as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None
    minutes = (time.monotonic() - begun_s) / 60
    console.print(f"{minutes:.1f} minutes; reports and pictures are in {out}", highlight=False)


def _measure(plan: Plan) -> None:
    """Measure all, and write what comes of it whenever there is more: a stop loses nothing."""
    groups: dict[int, Measured] = {}
    missing: list[Unavailable] = []
    text = ""
    with Fleet(plan.out, _tell) as fleet:
        for found in Comparing(plan, fleet, _tell).run():
            if isinstance(found, Unavailable):
                missing.append(found)
            else:
                groups[found.group] = found
            text = results(groups.values(), missing)
            (plan.out / "results.md").write_text(text + "\n")
    for number, group in groups.items():
        _draw(group, plan.out if number == 1 else plan.out / f"group-{number}")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _draw(group: Measured, folder: Path) -> None:
    reports = [report for of_rate in group.reports for report in of_rate]
    draw_all(reports, [f"{r.system} at {r.rate_per_s:.3g}/s" for r in reports], folder)
    for of_rate, comparisons in zip(group.reports, group.comparisons(), strict=True):
        ending = f"-at-{of_rate[0].rate_per_s:.3g}" if len(group.reports) > 1 else ""
        draw_ratios(comparisons, folder, ending)


def _tell(text: str) -> None:
    console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    cli()
