"""``conserve doctor``: examines this machine, or a cluster's, and prints the findings."""

import os
from collections.abc import Callable
from typing import Annotated

import typer
from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from conserve.settings import Settings
from conserve.versions import version_of
from conserve_cli.cluster import require_ray
from conserve_cli.doctor.findings import Finding, exit_status
from conserve_cli.launching import ConfigFile, SettingArguments, given, settings_from
from conserve_cli.output import console, refuse
from deployments.upstream.patch import fits
from deployments.upstream.patches import patches as all_patches

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def doctor(
    settings: SettingArguments = None,
    config: ConfigFile = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="A Ray cluster, whose nodes are examined; `auto`: the one on this machine.",
        ),
    ] = None,
    patches: Annotated[
        bool, typer.Option("--patches", help="List what is changed of other projects, and why.")
    ] = False,
) -> None:
    """Say what is wrong with this machine, or with a cluster, and what to do about it.

    One line a finding; the exit status is 1 if something is wrong.
    """
    if patches:
        console.print(_patches())
        return
    chosen = settings_from(given(settings, config))
    with console.status("looking at this machine") as status:
        findings = _examined(chosen, address, status.update)
    for finding in findings:
        console.print(line(finding), highlight=False, soft_wrap=True)
    raise typer.Exit(exit_status(findings))


def _examined(
    settings: Settings, address: str | None, on_progress: Callable[[str], None]
) -> list[Finding]:
    if address is None:
        # These imports, which load Ray, take a second or two.
        from conserve_cli.doctor.node import check_node

        return list(check_node(settings))
    try:
        require_ray(address)
        # Without this variable at its import, Ray tries twelve times, for eight minutes.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
        from conserve_cli.doctor.examine import examine_cluster

        return examine_cluster(settings, address, on_progress)
    except ConnectionError as error:
        refuse(f"--address: no usable Ray at {address}: {error}")


def _patches() -> Table:
    """Return a table of the changes to other projects, with the releases that are installed."""
    table = Table("patch", "of", "why", "upstream", box=ROUNDED, show_lines=True)
    for patch in all_patches():
        version = version_of(patch.package)
        colour = "green" if version and fits(patch, version) else "bold red"
        of = f"{patch.package} [{colour}]{version or 'not installed'}[/], for {patch.versions}"
        upstream = patch.upstream.partition(":")[0] if "#" not in patch.upstream else patch.upstream
        table.add_row(patch.name, of, patch.why, upstream)
    return table


_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "bold red"}


def line(finding: Finding) -> Text:
    """Return a finding as a line: its level, node, subject, what was seen, and what to do."""
    where = f"{finding.node} " if finding.node else ""
    text = Text.assemble(
        (f"{finding.level:<8}", _COLOURS[finding.level]),
        (where, "bold"),
        f"{finding.subject}: {finding.seen}",
    )
    if finding.to_do:
        text.append(f". To do: {finding.to_do}", "italic")
    return text
