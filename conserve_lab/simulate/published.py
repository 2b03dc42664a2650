"""Shows published and simulated figures side by side: a table, and a file."""

from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from autoscale.capacity.profile import Profile
from conserve_lab.simulate.reproduce import Reproduction, Unit


def show(found: Reproduction, profile: Profile, console: Console) -> None:
    table = Table(
        title=f"ConServe's figures, simulated on profile {profile.name}",
        caption="latencies over those of conversations that run alone, gaps not counted",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("fig.")
    table.add_column("")
    for heading in ("published", "simulated", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        relation = "" if row.relation == "=" else f"{row.relation} "
        if row.within is None:
            last = _said(row.difference, row.unit, signed=True)
        else:
            last = "[green]as said[/]" if row.within else "[red]not so[/]"
        table.add_row(
            row.figure,
            row.what,
            relation + _said(row.published, row.unit),
            _said(row.simulated, row.unit),
            last,
        )
    console.print(table)


def _said(value: float, unit: Unit, *, signed: bool = False) -> str:
    if unit in ("change", "share"):
        if signed:
            return f"{value * 100:+.1f} pp"
        return f"{value:+.1%}" if unit == "change" else f"{value:.1%}"
    return f"{value:{'+' if signed else ''}.2f}" + ("x" if unit == "times" else "")


def write(found: Reproduction, path: Path) -> None:
    rows = [
        {**msgspec.to_builtins(row), "difference": row.difference, "within": row.within}
        for row in found.rows
    ]
    path.write_bytes(msgspec.json.encode({"rows": rows}) + b"\n")
