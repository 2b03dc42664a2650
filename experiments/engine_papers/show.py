"""Tables."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.engine_papers import agentserve, mars
from experiments.engine_papers.claims import Claim, ratios


def show_mars(found: Sequence[mars.Outcome], console: Console) -> None:
    """Programs' mean times, and what MARS's strongest baseline takes of ConServe's."""
    for gpu in dict.fromkeys(one.point.gpu for one in found):
        on_it = [one for one in found if one.point.gpu == gpu]
        table = _table(f"MARS's workloads, {gpu}: a program's mean time in s; what was found")
        table.add_column("")
        for system in mars.SYSTEMS:
            table.add_column(system.name, justify="right")
        table.add_column("best of three / conserve", justify="right")
        table.add_column("with packing", justify="right")
        baselines = [one.name for one in mars.BASELINES]
        gains = ratios(on_it, lambda one: one.mean_s, baselines, mars.OURS.name)
        packed = ratios(on_it, lambda one: one.mean_s, baselines, mars.PACKED.name)
        for point, gain in gains.items():
            cells = []
            for system in mars.SYSTEMS:
                ones = [one for one in on_it if (one.point, one.system) == (point, system.name)]
                mean_s, share = fmean(one.mean_s for one in ones), fmean(one.found for one in ones)
                cells.append(f"{mean_s:,.0f} {share:.0%}")
            row = f"{point.regime}, {point.rate_per_s:g}/s"
            table.add_row(row, *cells, f"{gain:.2f}", f"{packed[point]:.2f}")
        console.print(table)


def show_without(found: Sequence[mars.Outcome], console: Console) -> None:
    """Mean times without a mechanism, over those with all of them."""
    points = list(dict.fromkeys(one.point for one in found))
    table = _table("ConServe without one mechanism: a program's mean time over that with all")
    table.add_column("")
    for point in points:
        table.add_column(f"{point.gpu}, {point.regime}, {point.rate_per_s:g}/s", justify="right")
    for system in mars.WITHOUT:
        losses = ratios(found, lambda one: one.mean_s, [system.name], mars.OURS.name)
        table.add_row(system.name, *(f"{losses[point]:.2f}" for point in points))
    console.print(table)


def show_agentserve(found: Sequence[agentserve.Outcome], console: Console) -> None:
    """Latencies at the most agents, and over all."""
    most = max(one.point.agents for one in found)
    for tools in dict.fromkeys(one.point.tools for one in found):
        table = _table(
            f"AgentServe's workloads, {most} agents, {tools} tools: TTFT p50 / p95 and TPOT p95, ms"
        )
        table.add_column("")
        for system in agentserve.SYSTEMS:
            table.add_column(system.name, justify="right")
        here = [one for one in found if (one.point.tools, one.point.agents) == (tools, most)]
        for point in dict.fromkeys(one.point for one in here):
            cells = []
            for system in agentserve.SYSTEMS:
                ones = [one for one in here if (one.point, one.system) == (point, system.name)]
                ttft = [1e3 * fmean(one.ttft_p50_s for one in ones)]
                ttft.append(1e3 * fmean(one.ttft_p95_s for one in ones))
                tpot_ms = 1e3 * fmean(one.tpot_p95_s for one in ones)
                cells.append(f"{ttft[0]:,.0f} / {ttft[1]:,.0f}, {tpot_ms:.1f}")
            paradigm = {"react": "ReAct"}.get(point.paradigm, "P&E")
            table.add_row(f"{point.gpu}, {point.model}, {paradigm}", *cells)
        console.print(table)


def show_claims(listed: Sequence[Claim], of: str, console: Console) -> None:
    """Show what is published, and what came out.

    Args:
        of: whose claims these are.
    """
    table = _table(f"{of}: claims, and what came out (ratios above 1: ConServe is better)")
    for heading in ("source", "what", "published", "simulated", "reached in"):
        table.add_column(heading, overflow="fold")
    for claim in listed:
        table.add_row(claim.source, claim.what, claim.published, claim.simulated, claim.comes_out)
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD)
