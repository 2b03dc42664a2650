"""``conserve simulate``: simulates a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from autoscale.capacity.profile import ProfileError, load_profile
from conserve.settings import SettingsError
from conserve_cli.output import console, refuse
from conserve_lab.cli.output import can_draw, make_folder, progress_bar, show_notes
from conserve_lab.cli.sharing import show_models, simulate_models
from conserve_lab.cli.workload_options import (
    ArrivalPattern,
    KnownWorkload,
    MaxContextTokens,
    MaxGap,
    MaxTurns,
    Preset,
    ProfileSource,
    RecordedData,
    ScaleGaps,
    ScaleTokens,
    Seed,
    SkipBad,
    SloMultiple,
    Tokenizer,
)
from conserve_lab.compare import compare, labels, show_comparisons, write_comparisons
from conserve_lab.report import Report, show_run, show_side_by_side, write_report
from conserve_lab.selection import Selection
from conserve_lab.simulate.run import PARKING, EngineCounts, simulate_selection
from conserve_lab.simulate.system import SimulationError
from conserve_lab.workloads import WorkloadError

cli = typer.Typer(
    help="Simulate a cluster: the live system's policies, on engines that a profile describes.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# With more conversations than this, latencies are kept as bare numbers of 8 bytes. Only ratios need
# each one's conversation, which would take most of the memory.
_MOST_SAMPLED = 10_000


@cli.command()
def simulate(
    profile: ProfileSource = "a40-qwen3-0.6b",
    system: Annotated[
        list[str] | None,
        typer.Option(
            help="conserve (the default: the paper's), pausing (the same with idle conversations "
            "giving up their room), parking (with host memory for them, too), elastic, "
            "elastic_pausing or elastic_parking (the same three with `placement: elastic`), "
            "collocated, collocated_parking (with pausing and host memory), full_disaggregation or "
            "per_turn; or another system's rules on collocated engines: vllm (least loaded), "
            "affinity, ttl (Continuum), attained (Autellix) or thunderagent; may be given several "
            "times, the first is the baseline."
        ),
    ] = None,
    prefillers: Annotated[
        int, typer.Option(help="How many prefillers; a collocated system has as many engines more.")
    ] = 1,
    decoders: Annotated[int, typer.Option(help="How many decoders.")] = 3,
    prefiller_cap: Annotated[
        float | None, typer.Option(help="Power cap of prefillers, W; of those in the profile.")
    ] = None,
    decoder_cap: Annotated[
        float | None, typer.Option(help="Power cap of decoders, in the same way.")
    ] = None,
    wrong_decision_rate: Annotated[
        float, typer.Option(help="Share of later turns that per_turn sends to a prefiller.")
    ] = 0.1,
    host_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of KV that parking's host memory has room for (default: twice what all "
            "decoders hold)."
        ),
    ] = None,
    workload: KnownWorkload = "synthetic",
    data: RecordedData = None,
    skip_bad: SkipBad = None,
    tokenizer: Tokenizer = None,
    preset: Preset = None,
    conversations: Annotated[int, typer.Option(help="How many conversations at each rate.")] = 500,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Conversations a second (default: 1); may be given several times."),
    ] = None,
    arrivals: ArrivalPattern = "poisson",
    seed: Seed = 0,
    scale_tokens: ScaleTokens = None,
    scale_gaps: ScaleGaps = None,
    max_gap: MaxGap = None,
    max_context_tokens: MaxContextTokens = None,
    max_turns: MaxTurns = None,
    block_tokens: Annotated[
        int,
        typer.Option(help="Tokens in a block of the engines' caches: 16 on a GPU, 128 on a CPU."),
    ] = 16,
    handoff_chunk_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens in a chunk; only whole ones are handed off: 256 on a GPU, 128 on a CPU."
        ),
    ] = 256,
    slo_multiple: SloMultiple = 5.0,
    models: Annotated[
        Path | None,
        typer.Option(
            help="A file of settings with `models`: simulates these together, without and with "
            "`share_gpus`. Each has a `profile`, and `decoders` that scale to `max_replicas`."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="With --models: how many GPUs there are.")] = 4,
    phase: Annotated[
        float,
        typer.Option(help="With --models: seconds after which another one gets the conversations."),
    ] = 600.0,
    start: Annotated[
        float, typer.Option(help="With --models: seconds that an engine takes to start.")
    ] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for reports and pictures; without: neither.")
    ] = None,
) -> None:
    """Simulate one system, or several side by side."""
    if not 0 <= wrong_decision_rate <= 1:
        refuse(f"--wrong-decision-rate is {wrong_decision_rate:g}; give a share, from 0 to 1")
    if host_tokens is not None and host_tokens < 1:
        refuse(f"--host-tokens is {host_tokens}; give a number from 1")
    if host_tokens is not None and not set(PARKING) & set(system or ()):
        refuse(f"--host-tokens is parking's; give --system {' or '.join(PARKING)}, too")
    if not slo_multiple > 0:
        refuse(f"--slo-multiple is {slo_multiple:g}; give a number above 0")
    if min(block_tokens, handoff_chunk_tokens) < 1:
        refuse("--block-tokens and --handoff-chunk-tokens are numbers from 1")
    if min(phase, start) <= 0:
        refuse("--phase and --start are seconds, above 0")
    try:
        found = load_profile(profile)
        selection = Selection.of(locals())
        show_notes(selection.workload())
        if models is not None:
            if system or out or len(rate or []) > 1:
                refuse("--models goes with one --rate, and without --system and --out")
            chosen = replace(selection, rate_per_s=(rate or [1.0])[0]).workload()
            with _progress(2 * conversations) as show:
                outcomes = simulate_models(models, chosen, gpus, phase, start, show)
            show_models(outcomes, console)
            return
        names, rates = system or ["conserve"], rate or [1.0]
        wanted = out is not None or len(names) * len(rates) > 1
        sampled = wanted and conversations <= _MOST_SAMPLED
        with _progress(len(names) * len(rates) * conversations) as show:
            reports = simulate_selection(
                names,
                rates,
                found,
                EngineCounts(prefillers, decoders, prefiller_cap, decoder_cap),
                selection,
                {
                    name: {
                        "block_tokens": block_tokens,
                        "handoff_chunk_tokens": handoff_chunk_tokens,
                        "wrong_decision_rate": wrong_decision_rate if name == "per_turn" else 0.0,
                        **({"host_tokens": host_tokens} if name in PARKING and host_tokens else {}),
                    }
                    for name in names
                },
                slo_multiple=slo_multiple,
                keep_samples=sampled,
                on_conversation=show,
            )
    except (ProfileError, SettingsError, SimulationError, WorkloadError) as error:
        refuse(str(error))
    _hand_out(reports, out, sampled)
    if wanted and not sampled:
        console.print(
            f"Of more than {_MOST_SAMPLED:,} conversations not every latency is kept: there are "
            "no ratios and no pictures of distributions.",
            highlight=False,
        )


def _hand_out(reports: list[Report], out: Path | None, sampled: bool) -> None:
    names = labels(reports)
    comparisons = compare(reports) if sampled else []
    if len(reports) == 1:
        show_run(reports[0], console)
    else:
        show_side_by_side(reports, console, names)
        if comparisons:
            show_comparisons(comparisons, console)
    if out is None:
        return
    make_folder(out)
    for name, report in zip(names, reports, strict=True):
        write_report(report, out / f"{name.replace(' ', '-').replace('/', '-per-')}.json")
    if comparisons:
        write_comparisons(comparisons, out / "comparison.json")
    if can_draw():
        from conserve_lab.plots import draw_all

        draw_all(reports, names, out)
    console.print(f"Reports are in {escape(str(out))}.", highlight=False)


@contextmanager
def _progress(conversations: int) -> Iterator[Any]:
    """Show a bar; yield a function to call at each conversation's end, with the name of its run."""
    with progress_bar() as bar:
        task = bar.add_task("unloaded", total=conversations)
        done = 0

        def show(what: str) -> None:
            nonlocal done
            done += 1
            # Drawing the bar takes longer than simulating a conversation.
            if done % 100 == 0:
                bar.update(task, description=what, completed=done)

        yield show
