"""Prints and draws what ``conserve plan --stages`` finds."""

from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from autoscale.capacity.profile import ProfileError, StageCurves, load_profile
from conserve_cli.output import console, refuse
from conserve_inside.policy.division import Division, StagePlan, plan_stages
from conserve_lab.cli.output import can_draw, make_folder

# A front may have dozens of divisions.
_ROWS = 10


def show_stages(source: str, tbt_bound_s: float, out: Path | None) -> None:
    """Print the plan of a profile's stages, and draw it into a folder; ends with one line if the
    profile cannot be read, or has none.
    """
    try:
        profile = load_profile(source)
    except ProfileError as error:
        refuse(str(error))
    curves = profile.stages
    if curves is None:
        refuse(
            f"profile {profile.name} has no stages: the times of encode, prefill and decode beside "
            "each other, by SMs; measure them on its GPU: conserve profile, as "
            "docs/how/capacity.md describes (Stages on one GPU)"
        )
    plan = plan_stages(curves, tbt_bound_s)
    shares = _table(f"SMs of decodes, of {curves.sms}", "beside", "S*", "S_min", "d")
    for stage, share in plan.shares.items():
        shares.add_row(stage, *(f"{sms}" for sms in share))
    by_pending = _table("by requests in encode and prefill", "pending", *_HEADINGS)
    for pending, division in enumerate(plan.by_pending, 1):
        more = " or more" if pending == len(plan.by_pending) else ""
        by_pending.add_row(f"{pending}{more}", *_cells(division))
    console.print(shares)
    console.print(by_pending)
    console.print(_front_table(plan))
    best = plan.best
    if not plan.within_bound:
        console.print(
            f"[yellow]No size keeps a decode step within {tbt_bound_s * 1e3:g} ms:[/yellow] "
            f"decodes always have the largest, {plan.least_sms} SMs, and steps take "
            f"{best.tbt_s * 1e3:.1f} ms.",
            highlight=False,
        )
    console.print(
        f"A request that does not wait takes [bold]{best.latency_s:.2f} s[/bold] with "
        f"{best.encode_sms} SMs for decodes beside its encode and {best.prefill_sms} beside its "
        f"prefill, at up to {best.throughput_per_s:.3f} requests/s.",
        highlight=False,
    )
    if out is None:
        return
    make_folder(out)
    if can_draw():
        _draw(profile.name, curves, plan, out)
        console.print(f"The picture is in {escape(str(out))}.", highlight=False)


# --- Tables ---------------------------------------------------------------------------------------


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "beside" else "right", no_wrap=True)
    return table


def _front_table(plan: StagePlan) -> Table:
    front = plan.front
    chosen = front
    if len(front) > _ROWS:
        places = {round(row * (len(front) - 1) / (_ROWS - 1)) for row in range(_ROWS)}
        places |= {front.index(one) for one in plan.by_pending if one in front}
        chosen = tuple(front[place] for place in sorted(places))
    table = _table(
        f"the front of latency against throughput: {len(chosen)} of {len(front)} divisions",
        *_HEADINGS,
        "pending",
    )
    for division in chosen:
        known = division in plan.by_pending
        table.add_row(*_cells(division), f"{plan.by_pending.index(division) + 1}" if known else "")
    return table


_HEADINGS = ("beside\nencode", "beside\nprefill", "latency", "requests/s", "decode\nstep")


def _cells(division: Division) -> tuple[str, ...]:
    return (
        f"{division.encode_sms}",
        f"{division.prefill_sms}",
        f"{division.latency_s:.2f} s",
        f"{division.throughput_per_s:.3f}",
        f"{division.tbt_s * 1e3:.1f} ms",
    )


# --- The picture ----------------------------------------------------------------------------------


def _draw(name: str, curves: StageCurves, plan: StagePlan, folder: Path) -> None:
    from matplotlib.figure import Figure

    from conserve_lab.plots import save

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_front(left, plan)
    _draw_pending(right, curves, plan)
    figure.suptitle(f"{name}: {curves.sms} SMs, {curves.output_tokens:g} output tokens")
    save(figure, folder, "stages")


def _draw_front(axes: Any, plan: StagePlan) -> None:
    from conserve_lab.plots import quiet

    def place(divisions: tuple[Division, ...]) -> tuple[list[float], list[float]]:
        return [one.throughput_per_s for one in divisions], [one.latency_s for one in divisions]

    axes.scatter(*place(plan.divisions), s=6, color="#cccccc", label="every division")
    axes.plot(*place(plan.front), color="#0072B2", linewidth=1.8, label="front, within the bound")
    axes.scatter(
        *place(plan.by_pending[1:]), s=42, color="#0072B2", zorder=3,
        label="n are pending: SMs beside encode, prefill",
    )  # fmt: skip
    axes.scatter(
        *place(plan.by_pending[:1]), s=150, marker="*", color="#D55E00", zorder=4,
        label="one is pending: S*, the least latency",
    )  # fmt: skip
    named: dict[Division, str] = {}
    for pending, division in enumerate(plan.by_pending, 1):
        named.setdefault(division, f"n = {pending}: {division.encode_sms}, {division.prefill_sms}")
    for division, said in named.items():
        where = (division.throughput_per_s, division.latency_s)
        axes.annotate(
            said, where, xytext=(9, -9), textcoords="offset points", va="center", fontsize=8
        )
    # Far beyond the front, divisions starve a stage.
    latest_s = max(one.latency_s for one in plan.front)
    axes.set_ylim(plan.best.latency_s * 0.9, latest_s * 1.25)
    axes.margins(x=0.12)
    axes.set(xlabel="throughput (requests/s)", ylabel="latency without waiting (s)")
    axes.set_title("Latency against throughput")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    quiet(axes)


def _draw_pending(axes: Any, curves: StageCurves, plan: StagePlan) -> None:
    from conserve_lab.plots import quiet, style

    shown = range(1, len(plan.by_pending) + 3)
    for index, (stage, share) in enumerate(plan.shares.items()):
        sms = [share.decode_sms(pending) for pending in shown]
        axes.plot(shown, sms, label=f"beside {stage}", **style(index, marker=True))
    axes.axhline(plan.least_sms, color="#888888", linewidth=1, linestyle=":")
    axes.annotate(
        "S_min", (1, plan.least_sms), xytext=(0, 4), textcoords="offset points", color="#555555"
    )
    axes.set_xticks(shown)
    axes.set_ylim(0, max(share.most_sms for share in plan.shares.values()) * 1.15)
    axes.set(xlabel="requests in encode and prefill (n)", ylabel=f"SMs of decodes, of {curves.sms}")
    axes.set_title("Decodes' share")
    axes.legend(frameon=False, fontsize=8)
    quiet(axes)
