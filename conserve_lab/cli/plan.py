"""``conserve plan``: plans prefillers, decoders and slots from a profile and a workload."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from autoscale.capacity.profile import ProfileError, load_profile
from conserve_cli.output import console, refuse
from conserve_inside.policy.division import TBT_BOUND_S
from conserve_lab.capacity.demand import Demand, DemandError, PlannedTurn, measure_demand
from conserve_lab.capacity.plan import Plan, PlanError, Provision, RoleProfiles, make_plan
from conserve_lab.cli.output import given_options, progress_bar, show_notes
from conserve_lab.cli.own_traffic import Recorded, export_weka, profiles_of, show_own_traffic
from conserve_lab.cli.stages import show_stages
from conserve_lab.cli.workload_options import (
    KnownWorkload,
    MaxContextTokens,
    MaxGap,
    MaxTurns,
    Preset,
    RecordedData,
    ScaleGaps,
    ScaleTokens,
    Seed,
    SkipBad,
    Tokenizer,
)
from conserve_lab.selection import Selection
from conserve_lab.simulate.system import SimulationError
from conserve_lab.workloads import Latency, Spread, Workload, WorkloadError
from hetero.container import cpu_dtype

cli = typer.Typer(
    help="Plan prefillers, decoders and slots from a profile and a workload.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
_Read = TypeVar("_Read", Spread, Latency)

# Workloads whose lengths are known before they run.
_KINDS = ("synthetic", "recorded")
# A plan for one rate also shows these multiples of it.
_MULTIPLES = (2.0, 5.0, 10.0)
# Options of a plan of stages; it has no workload.
_OF_STAGES = ("stages", "tbt_bound", "out")


@dataclasses.dataclass(frozen=True, slots=True)
class Impossible:
    """Replaces a plan if no number of replicas would do."""

    rate_per_s: float
    reason: str


@cli.command()
def plan(
    context: typer.Context,
    profile: Annotated[
        str | None,
        typer.Option(
            help="A profile's file, or the name of one that comes with ConServe. With --from: "
            "another than the recording's, to compare."
        ),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="What `conserve record` wrote: check the simulator against it, and plan for it.",
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(help="With --from: weka writes its sessions to --out, as AIPerf reads them."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Conversations a second (default: 1); if recorded, sessions a second, whose "
            "sub-agents come besides. Several: a row each; one: also 2, 5 and 10 times as many."
        ),
    ] = None,
    workload: KnownWorkload = "synthetic",
    data: RecordedData = None,
    skip_bad: SkipBad = None,
    tokenizer: Tokenizer = None,
    preset: Preset = None,
    turns: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:MEAN:HIGH",
            help="Turns of a conversation, instead of the preset's. One number: always that many.",
        ),
    ] = None,
    first_tokens: Annotated[
        str | None,
        typer.Option(metavar="LOW:MEAN:HIGH", help="Tokens of a first prompt, in the same way."),
    ] = None,
    append_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:MEAN:HIGH", help="New input tokens of a later turn, in the same way."
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(metavar="LOW:MEAN:HIGH", help="Tokens of an output, in the same way."),
    ] = None,
    tool_latency: Annotated[
        str | None,
        typer.Option(metavar="P50:P95", help="Seconds that a tool takes, in the same way."),
    ] = None,
    conversations: Annotated[
        int, typer.Option(help="How many conversations (recorded: sessions) the plan looks at.")
    ] = 1000,
    seed: Seed = 0,
    scale_tokens: ScaleTokens = None,
    scale_gaps: ScaleGaps = None,
    max_gap: MaxGap = None,
    max_context_tokens: MaxContextTokens = None,
    max_turns: MaxTurns = None,
    headroom: Annotated[
        float, typer.Option(help="Add this share to the decoders that are needed.")
    ] = 0.2,
    prefill_headroom: Annotated[
        float, typer.Option(help="Add this share to the prefillers; with 0 their queue has no end.")
    ] = 0.2,
    provision: Annotated[
        str,
        typer.Option(
            help="Count decoders for the rate at which the prefillers saturate, as in the paper "
            "(saturation), or for the rate asked for (rate)."
        ),
    ] = "saturation",
    stages: Annotated[
        bool,
        typer.Option(
            "--stages",
            help="Instead plan the SMs that decodes have beside encodes of images and prefills on "
            "one GPU, from the profile's stages.",
        ),
    ] = False,
    tbt_bound: Annotated[
        float, typer.Option(help="With --stages: the longest step of decodes, in seconds.", min=0)
    ] = TBT_BOUND_S,
    out: Annotated[
        Path | None, typer.Option(help="Folder for pictures, with --stages or --from.")
    ] = None,
) -> None:
    """Plan numbers of replicas from a profile and a workload, or one engine's stages."""
    for name, option in given_options(context):
        if stages and name not in ("profile", *_OF_STAGES):
            refuse(f"{option} does not go with --stages, which has no workload; leave it out")
        if not stages and name in _OF_STAGES and not (recording and name == "out"):
            refuse(f"{option} is for a plan of stages; add --stages")
        if recording and name in ("workload", "data", "preset"):
            refuse(f"{option} does not go with --from, which has the sessions; leave it out")
    if export is not None and (export != "weka" or recording is None or out is None):
        refuse(f"--export {export}: give weka, with --from FILE and --out FOLDER")
    if profile is None and recording is None:
        refuse("give --profile, or --from a recording that names one")
    if stages:
        assert profile is not None
        show_stages(profile, tbt_bound, out)
        return
    if workload not in _KINDS:
        refuse(
            f"--workload {workload}: its lengths are not known before it runs; "
            f"give {' or '.join(_KINDS)}"
        )
    if provision not in get_args(Provision):
        refuse(f"--provision {provision}: give {' or '.join(get_args(Provision))}")
    rates = rate or [1.0]
    try:
        if recording is not None:
            recorded = Recorded(recording, bool(skip_bad))
            workload, data = "recorded", recording
            own, others = profiles_of(recorded, profile)
            own = recorded.profile(own)
            rates, conversations = rate or [recorded.rate_per_s], recorded.sessions
            show_own_traffic(recorded, own, others, out)
            if export is not None and out is not None:
                export_weka(recorded, out / export)
        else:
            assert profile is not None
            own = load_profile(profile)
        spread = "LOW:MEAN:HIGH, or one number"
        changed = {
            "turns": _parsed("--turns", turns, _spread, spread),
            "first_prompt_tokens": _parsed("--first-tokens", first_tokens, _spread, spread),
            "append_tokens": _parsed("--append-tokens", append_tokens, _spread, spread),
            "output_tokens": _parsed("--output-tokens", output_tokens, _spread, spread),
            "tool_latency": _parsed(
                "--tool-latency", tool_latency, _latency, "P50:P95, in seconds"
            ),
        }
        selection = Selection.of(locals())
        made = _workload(selection, {name: one for name, one in changed.items() if one})
        show_notes(made)
        demand = measure_demand(_watched(made))
        shares: dict[str, Any] = {"headroom": headroom, "prefill_headroom": prefill_headroom}
        shares["provision"] = provision
        profiles = RoleProfiles(own, own)
        each = _conversations_each(made)
        # A requested rate that is impossible is refused; additional ones are only reported.
        plans: list[Plan | Impossible] = [
            make_plan(demand, profiles, one * each, **shares) for one in rates
        ]
        first = plans[0]
        choices = [RoleProfiles(own, own, None, power.cap_w) for power in own.power[1:]]
        multiples = _MULTIPLES if len(rates) == 1 else ()
        plans += [_attempt(demand, profiles, more * rates[0] * each, shares) for more in multiples]
        alternatives = [(profiles, first)]
        alternatives += [(one, _attempt(demand, one, rates[0] * each, shares)) for one in choices]
    except (DemandError, PlanError, ProfileError, SimulationError, WorkloadError) as error:
        refuse(str(error))
    _show(demand, made, plans, alternatives)
    if off := own.off_on(cpu_dtype()[0]):
        console.print(f"[yellow]{escape(off[2:])}.[/yellow]", highlight=False)


def _attempt(
    demand: Demand, profiles: RoleProfiles, rate_per_s: float, shares: dict[str, Any]
) -> Plan | Impossible:
    try:
        return make_plan(demand, profiles, rate_per_s, **shares)
    except PlanError as error:
        return Impossible(rate_per_s, str(error))


# --- The workload ---------------------------------------------------------------------------------


def _parsed(option: str, text: str | None, read: Callable[[str], _Read], form: str) -> _Read | None:
    try:
        return None if text is None else read(text)
    except WorkloadError as error:
        raise WorkloadError(f"{option} {text}: {error}") from None
    except ValueError:
        raise WorkloadError(f"{option} {text}: write {form}") from None


def _spread(text: str) -> Spread:
    if ":" not in text:
        return Spread(int(text), int(text), int(text))
    low, mean, high = text.split(":")
    return Spread(int(low), float(mean), int(high))


def _latency(text: str) -> Latency:
    p50_s, _, p95_s = text.partition(":")
    return Latency(float(p50_s), float(p95_s or p50_s))


def _workload(selection: Selection, changed: dict[str, Any]) -> Workload:
    if changed and selection.kind != "synthetic":
        raise WorkloadError(
            "--turns, --first-tokens, --append-tokens, --output-tokens and --tool-latency are "
            "for the workload synthetic; leave them out"
        )
    return selection.make(selection.seed, **changed)


def _conversations_each(workload: Workload) -> float:
    """Return the conversations of an arrival, with a recorded session's sub-agents."""
    sessions = workload.counts.get("sessions")
    return workload.counts["conversations"] / sessions if sessions else 1.0


def planned_turns(workload: Workload) -> Iterator[list[PlannedTurn]]:
    """Yield every conversation's turns, as `conserve bench` would send them.

    There stand-in tokens, which count as new, replace the model's answers in later prompts. Raises
    `DemandError` if a length is not known in advance.
    """
    for _, script in workload:
        turns = []
        while (request := script.next(None)) is not None:
            prompt, output = request.prompt_tokens, request.output_tokens
            if prompt is None or output is None:
                raise DemandError(
                    f"the workload {workload.name} does not say how long its turns are; "
                    f"give {' or '.join(_KINDS)}"
                )
            reused = request.reused_tokens or 0
            turns.append(PlannedTurn(prompt - reused, reused, output, request.gap_s))
        yield turns


def _watched(workload: Workload) -> Iterator[list[PlannedTurn]]:
    with progress_bar() as bar:
        task = bar.add_task("reading conversations", total=workload.counts.get("conversations"))
        for turns in planned_turns(workload):
            yield turns
            bar.advance(task)


# --- What is shown --------------------------------------------------------------------------------


def _show(
    demand: Demand,
    workload: Workload,
    plans: Sequence[Plan | Impossible],
    alternatives: Sequence[tuple[RoleProfiles, Plan | Impossible]],
) -> None:
    profiles, first = alternatives[0]
    assert isinstance(first, Plan)
    console.print(_workload_table(demand, workload, first))
    console.print(_engine_table(profiles, first))
    console.print(_rates_table(plans))
    for plan in plans:
        if isinstance(plan, Impossible):
            _say_why(f"{plan.rate_per_s:g} conversations/s", plan)
    console.print(_alternatives_table(alternatives))
    for other, plan in alternatives:
        if isinstance(plan, Impossible):
            _say_why(_decoders(other), plan)
    console.print(
        f"At {first.rate_per_s:g} conversations/s: [bold]{_counted(first)}[/bold], "
        f"{first.cost.slots} slots each; {first.binding} decides "
        f"(throughput needs {first.needed_throughput:.2f}, memory {first.needed_memory:.2f}).",
        highlight=False,
    )
    for said in first.assumptions_broken:
        console.print(f"[yellow]Not as assumed:[/yellow] {escape(said)}", highlight=False)


def _say_why(what: str, plan: Impossible) -> None:
    console.print(
        f"[yellow]Not possible, {escape(what)}:[/yellow] {escape(plan.reason)}.", highlight=False
    )


def _decoders(profiles: RoleProfiles) -> str:
    name, cap_w = profiles.decoder.name, profiles.decoder_cap_w
    return name if cap_w is None else f"{name}, capped at {cap_w:g} W"


def _counted(plan: Plan) -> str:
    prefillers = "1 prefiller" if plan.prefillers == 1 else f"{plan.prefillers:,} prefillers"
    decoders = "1 decoder" if plan.decoders == 1 else f"{plan.decoders:,} decoders"
    return f"{prefillers}, {decoders}"


def _figures(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column("")
    table.add_column("", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _workload_table(demand: Demand, workload: Workload, plan: Plan) -> Table:
    each = _conversations_each(workload)
    sessions = [
        ("recorded sessions", f"{workload.counts.get('sessions', 0):,}"),
        ("conversations a session, sub-agents' included", f"{each:.3g}"),
        ("sessions that arrive", f"{plan.rate_per_s / each:g} a second"),
        ("so, conversations that arrive", f"{plan.rate_per_s:g} a second"),
    ]
    return _figures(
        f"a conversation, workload {workload.name}",
        [
            *(sessions if "sessions" in workload.counts else ()),
            ("conversations that this is the mean of", f"{demand.conversations:,}"),
            ("turns", f"{demand.turns:,.1f}"),
            ("first turn's input, L_in", f"{demand.first_tokens:,.0f} tokens"),
            ("later turns' new input", f"{demand.append_tokens:,.0f} tokens"),
            ("their share of all new input", f"{demand.later_share:.0%}"),
            ("output", f"{demand.output_tokens:,.0f} tokens"),
            ("work of decoders, L_d", f"{demand.decoder_tokens:,.0f} tokens"),
            ("KV at its peak", f"{demand.peak_tokens:,.0f} tokens"),
            ("KV at its peak, the largest", f"{demand.longest_peak_tokens:,} tokens"),
            ("tools and other gaps", f"{demand.gap_s:,.1f} s"),
            ("lifetime in full batches, W", f"{plan.cost.lifetime_s:,.1f} s"),
        ],
    )


def _engine_table(profiles: RoleProfiles, plan: Plan) -> Table:
    one = plan.cost
    return _figures(
        f"an engine ({profiles.prefiller.name})",
        [
            ("prefiller, T_p", f"{one.prefill_tokens_per_s:,.0f} input tokens/s"),
            ("it saturates at R* = T_p / L_in", f"{one.saturation_per_s:,.3f} conversations/s"),
            ("decoder, T_d for this mix", f"{one.decoder_tokens_per_s:,.0f} tokens/s"),
            ("KV of a decoder", f"{profiles.decoder.kv_capacity_tokens:,} tokens"),
            ("slots, B", f"{one.slots:,}"),
            ("TBT of a full batch", f"{one.tbt_s * 1e3:,.1f} ms"),
        ],
    )


def _rates_table(plans: Sequence[Plan | Impossible]) -> Table:
    table = Table(title="replicas by rate of arrivals", box=box.SIMPLE_HEAD, title_justify="left")
    counts = ("conv./s", "pre-\nfillers", "de-\ncoders")
    for heading in (*counts, "decides", "used\n(P, D, B)", "no slot\nfree", "J/conv."):
        justify: Any = "left" if heading == "decides" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for plan in plans:
        if isinstance(plan, Impossible):
            table.add_row(f"{plan.rate_per_s:g}", *("-",) * 6)
            continue
        joules = plan.joules_per_conversation
        used = (plan.prefiller_utilisation, plan.decoder_utilisation, plan.slot_utilisation)
        table.add_row(
            f"{plan.rate_per_s:g}",
            f"{plan.prefillers:,}",
            f"{plan.decoders:,}",
            plan.binding,
            ", ".join(f"{share:.0%}" for share in used),
            f"{plan.overflow_share:.1%}",
            "" if joules is None else f"{joules:,.0f}",
        )
    return table


def _alternatives_table(alternatives: Sequence[tuple[RoleProfiles, Plan | Impossible]]) -> Table:
    rate = alternatives[0][1].rate_per_s
    table = Table(
        title=f"alternatives at {rate:g} conversations/s", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for heading in ("decoders on", "prefillers", "decoders", "TBT, full batch", "W", "J/conv."):
        table.add_column(heading, justify="left" if heading == "decoders on" else "right")
    for profiles, plan in alternatives:
        if isinstance(plan, Impossible):
            table.add_row(_decoders(profiles), *("-",) * 5)
            continue
        joules = plan.joules_per_conversation
        table.add_row(
            _decoders(profiles),
            f"{plan.prefillers:,}",
            f"{plan.decoders:,}",
            f"{plan.cost.tbt_s * 1e3:,.1f} ms",
            "" if plan.watts is None else f"{plan.watts:,.0f}",
            "" if joules is None else f"{joules:,.0f}",
        )
    return table
