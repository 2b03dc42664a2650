"""``conserve profile``: measures a running application and fits its curves."""

import asyncio
import json
import math
import os
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from autoscale.capacity.profile import (
    NAME_PATTERN,
    CappedPower,
    Profile,
    ProfileError,
    Quality,
    StageCurves,
    load_profile,
)
from autoscale.capacity.served import engine_versions
from conserve.embedded import model_path
from conserve_cli.output import console, refuse
from conserve_lab.capacity import fit
from conserve_lab.cli.output import can_draw, progress_bar
from conserve_lab.cli.profile.draw import DrawMeter, NoDraw, measure_power
from conserve_lab.cli.profile.measure import Application, MeasureError, Probe, find_application
from conserve_lab.cli.workload_options import Tokenizer
from conserve_lab.machine import environment
from conserve_lab.workloads import PRESETS, WorkloadError
from conserve_lab.workloads.recorded import recorded_sessions

cli = typer.Typer(
    help="Measure a running application's engines, and write their profile.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# What a profile keeps measured points of.
_CURVES = (
    *("prefill", "decode", "interference", "handoff", "encoding", "overhead"),
    *("stage_encode", "stage_prefill"),
)

_OUTPUT_TOKENS = 48
_LONGEST_TOKENS = 8192
# Widths and heights of images; many processors make the same of all of them.
_IMAGE_PIXELS = (224, 448, 896)
# A usual prompt, and a usual image: a screenshot, as processors scale it down.
_STAGE_TOKENS, _STAGE_PIXELS = 2048, 896


@dataclass(frozen=True, slots=True)
class Grid:
    """Lengths in tokens at which to measure."""

    cold: list[int]
    appends: list[tuple[int, int]]  # New tokens, and cached ones before them.
    decodes: list[tuple[int, int]]  # Sequences, and the context of each.
    beside: list[tuple[int, int, int, int]]  # Both: sequences, context, new, cached.
    handoffs: list[int]
    turns: list[tuple[int, int]]  # A first prompt, and new tokens of a second turn or 0.


def make_grid(longest_tokens: int, capacity_tokens: int, largest_batch: int) -> Grid:
    """Choose powers of two up to the longest prompt, and batches whose KV fits.

    Raises `MeasureError` if prompts are too short, or batches too few, for a curve.
    """
    powers = [2**n for n in range(7, 20) if 2**n <= longest_tokens]
    if len(powers) < 4:
        raise MeasureError(
            f"prompts of up to {longest_tokens} tokens are too short for a curve; allow 1024"
        )
    contexts = sorted({powers[0], powers[len(powers) // 2 - 1], powers[-2]})
    batches = [2**n for n in range(8) if 2**n <= largest_batch]
    room = capacity_tokens // 2
    decodes = [
        (batch, context)
        for batch in batches
        for context in contexts
        if batch * (context + _OUTPUT_TOKENS) <= room
    ]
    sizes = {batch for batch, _ in decodes}
    amounts = {batch * context for batch, context in decodes}
    if min(len(sizes), len(amounts)) < 3:
        raise MeasureError(
            f"batches of up to {largest_batch} sequences in half of {capacity_tokens:,} tokens of "
            f"KV make {len(sizes)} batch sizes and {len(amounts)} amounts of KV, and a curve needs "
            "3 of each; allow batches of 4 (--largest-batch), or give the decoder more memory"
        )
    return Grid(
        cold=powers,
        appends=[(n, c) for n in powers[:4] for c in contexts[1:] if n + c <= longest_tokens],
        decodes=decodes,
        beside=[
            # Sizes are far apart, as noise would hide an append as short as a decode step.
            (batch, contexts[1], new, contexts[1])
            for batch in batches[1:4:2]
            for new in (powers[0], powers[2], min(powers[3], longest_tokens - contexts[1]))
        ],
        # Short prompts tell little, but a line needs three points.
        handoffs=powers[min(2, len(powers) - 3) :],
        # First prompts have several chunks, so that some are handed off.
        turns=[(n, 0) for n in powers[2:-1]] + [(c, powers[0]) for c in powers[2:-1]],
    )


@cli.command()
def profile(
    url: Annotated[str, typer.Argument(help="URL of a running application: http://127.0.0.1:8000")],
    out: Annotated[Path, typer.Option(help="The profile's file; pictures go beside it.")],
    name: Annotated[
        str | None, typer.Option(help="The profile's name (default: the file's).")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often each measurement is repeated.")
    ] = 5,
    data: Annotated[
        Path | None, typer.Option(help="Recorded sessions, for lengths of prompts and answers.")
    ] = None,
    tokenizer: Tokenizer = None,
    longest_tokens: Annotated[
        int, typer.Option(help="Longest prompt that is measured.")
    ] = _LONGEST_TOKENS,
    largest_batch: Annotated[
        int, typer.Option(help="Most sequences that decode at the same time.")
    ] = 8,
    vocabulary: Annotated[
        str,
        typer.Option(
            metavar="FIRST:LAST", help="Token ids that prompts are made of, without special ones."
        ),
    ] = "1000:4000",
    kv_bytes_per_token: Annotated[
        float | None,
        typer.Option(
            help="Bytes of KV that a token takes in all layers; known for the embedded model."
        ),
    ] = None,
    batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of an engine's step (vLLM's max_num_batched_tokens), for the "
            "simulator; default: what the application says.",
        ),
    ] = None,
    output_tokens: Annotated[
        float, typer.Option(help="With stages on one GPU: tokens of an answer, on average.", min=1)
    ] = PRESETS["conserve"].output_tokens.mean,
    min_r_squared: Annotated[
        float | None,
        typer.Option(
            help="A curve that explains less of its points is refused (default: "
            f"{fit.MIN_R_SQUARED:g}; for iterations {fit.MIN_R_SQUARED_STEPS:g})."
        ),
    ] = None,
    add_cap: Annotated[
        bool,
        typer.Option(
            "--add-cap",
            help="Measure what the power cap that is set now costs, and add it to the profile in "
            "--out, which was measured without it.",
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of the prompts, and of the order of measurements.")
    ] = 0,
    plots: Annotated[bool, typer.Option(help="Draw the fits.")] = True,
) -> None:
    """Measure a running application; nothing else should use it, or the machine."""
    if data is not None:
        try:
            found = recorded_sessions(data, tokenizer=tokenizer).values()
            calls = [call for read in found for call in read().calls]
        except WorkloadError as error:
            refuse(str(error))
        longest_tokens = min(longest_tokens, max(call.prompt_tokens for call in calls))
        output_tokens = statistics.fmean(call.output_tokens for call in calls)
    low, _, high = vocabulary.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) + 1 < int(high)):
        refuse(f"--vocabulary {vocabulary}: give two token ids, as in 1000:4000")
    name = name or out.stem
    if re.fullmatch(NAME_PATTERN, name) is None:
        refuse(
            f"a profile cannot be called {name!r}: give --name, of up to 64 letters, digits, "
            "dots, dashes and underscores"
        )
    if kv_bytes_per_token is not None and not (
        math.isfinite(kv_bytes_per_token) and kv_bytes_per_token > 0
    ):
        refuse(f"--kv-bytes-per-token is {kv_bytes_per_token:g}; give a number above 0")
    repetitions = _Repetitions(repeats, random.Random(seed))
    tokens = range(int(low), int(high))
    if add_cap:
        try:
            known = load_profile(out)
            capped = asyncio.run(_measure_cap(url, known, repetitions, largest_batch, tokens, seed))
            save_profile(with_power(known, capped), out)
        except (MeasureError, ProfileError, fit.FitError) as error:
            refuse(str(error))
        except NoDraw as error:
            refuse(f"the cap's power was not measured: {error}")
        _show_cap(known, repetitions.points, capped)
        console.print(f"The cap is in {escape(str(out))}.", highlight=False)
        return
    try:
        made = asyncio.run(
            _measure(
                url,
                repetitions,
                out=out,
                name=name,
                longest_tokens=longest_tokens,
                largest_batch=largest_batch,
                vocabulary=tokens,
                kv_bytes_per_token=kv_bytes_per_token,
                batched_tokens=batched_tokens,
                output_tokens=output_tokens,
                # Unless it is given, each curve has its own default.
                limits={} if min_r_squared is None else {"min_r_squared": min_r_squared},
                seed=seed,
            )
        )
        save_profile(made, out)
    except (MeasureError, ProfileError) as error:
        refuse(str(error))
    except fit.FitError as error:
        refused = out.with_suffix(".refused.json")
        refused.write_text(json.dumps(repetitions.as_data(), indent=1))
        refuse(f"{error}. What was measured is in {refused}")
    _show(made)
    if plots and can_draw():
        from conserve_lab.cli.profile.pictures import draw_fits

        draw_fits(made, out.with_suffix(".png"))
    console.print(f"The profile is in {escape(str(out))}.", highlight=False)


# --- Measuring ------------------------------------------------------------------------------------


class _Repetitions:
    """Makes each of some calls once to warm up, then all over and over, in random order.

    Attributes:
        points: by curve, one for each call so far: the median of its repetitions.
    """

    def __init__(self, repeats: int, order: random.Random) -> None:
        self.points: dict[str, list[Any]] = {curve: [] for curve in _CURVES}
        self._repeats = repeats
        self._order = order
        self._bar = progress_bar()

    @contextmanager
    def of(self, calls: int) -> Iterator[Self]:
        """Show the progress of this number of calls meanwhile."""
        with self._bar as bar:
            self._task = bar.add_task("", total=calls * (self._repeats + 1))
            yield self

    async def __call__(
        self, curve: str, what: str, calls: Sequence[Callable[[], Awaitable[Any]]]
    ) -> None:
        self._bar.update(self._task, description=what)
        found: dict[int, list[Any]] = defaultdict(list)
        for round_number in range(self._repeats + 1):
            for index in self._order.sample(range(len(calls)), len(calls)):
                point = await calls[index]()
                if round_number:
                    found[index].append(point)
                self._bar.advance(self._task)
        self.points[curve] += map(_median, found.values())

    def as_data(self) -> dict[str, list[dict[str, Any]]]:
        """Return the points by curve, as in a profile."""
        return {curve: [asdict(one) for one in points] for curve, points in self.points.items()}


async def _measure_alone(probe: Probe, grid: Grid, repeat: _Repetitions) -> None:
    """Measure prefills and batches of decodes, each without the other."""
    cold = [partial(probe.cold_prefill, n) for n in grid.cold]
    await repeat("prefill", "cold prefills", cold)
    await repeat("prefill", "appends", [partial(probe.append, *one) for one in grid.appends])
    decodes = [partial(probe.decode, *one, _OUTPUT_TOKENS) for one in grid.decodes]
    await repeat("decode", "decodes", decodes)


async def _measure(
    url: str,
    repetitions: _Repetitions,
    *,
    out: Path,
    name: str,
    longest_tokens: int,
    largest_batch: int,
    vocabulary: range,
    kv_bytes_per_token: float | None,
    batched_tokens: int | None,
    output_tokens: float,
    limits: dict[str, float],
    seed: int,
) -> Profile:
    application = await find_application(url)
    if kv_bytes_per_token is None:
        kv_bytes_per_token = _embedded_kv_bytes_per_token(application)
    capacity = application.decoder.capacity_tokens
    grid = make_grid(longest_tokens, capacity, largest_batch)
    _prepare(out)
    count = sum(map(len, astuple(grid)))
    async with Probe(application, vocabulary, seed) as probe:
        pixels = _IMAGE_PIXELS if await probe.sees() else ()
        sizes_sms = await _stage_sizes(application, probe, bool(pixels))
        with repetitions.of(count + len(pixels) + 2 * len(sizes_sms[:-1])) as repeat:
            await _measure_alone(probe, grid, repeat)
            await repeat("encoding", "images", [partial(probe.encode, one) for one in pixels])
            beside = [partial(probe.append_beside, *one) for one in grid.beside]
            await repeat("interference", "appends beside decodes", beside)
            points = repeat.points
            prefill = fit.fit_prefill(points["prefill"], **limits)
            handoffs = [partial(probe.handoff, n, prefill.seconds) for n in grid.handoffs]
            await repeat("handoff", "handoffs", handoffs)
            await repeat("overhead", "turns", [partial(probe.turn, *one) for one in grid.turns])
            stages = await _stages(probe, repeat, sizes_sms, longest_tokens, output_tokens)
        power = await _power(url, probe, grid)
    decode = fit.fit_decode(points["decode"], **limits)
    about = environment()
    return Profile(
        name=name,
        origin="measured",
        model=application.model,
        date=datetime.now(UTC).date().isoformat(),
        versions=engine_versions(),
        hardware=about["machine"],
        prefill=prefill,
        decode=decode,
        interference=fit.fit_interference(points["interference"], prefill, decode, **limits),
        handoff=fit.fit_handoff(points["handoff"], kv_bytes_per_token, **limits),
        overhead=fit.fit_overhead(points["overhead"], **limits),
        encoding=fit.fit_encoding(points["encoding"], prefill, **limits) if pixels else None,
        stages=stages,
        kv_capacity_tokens=capacity,
        max_batched_tokens=_batched_tokens(application, batched_tokens),
        power=power,
        points=repetitions.as_data(),
    )


async def _stage_sizes(application: Application, probe: Probe, sees: bool) -> list[int]:
    """Return the SMs that decodes can have beside the decoder's lane; empty: print why."""
    sizes_sms, why = None, "the decoder has no lane (engine_scheduler=conversation_lane)"
    try:
        sizes_sms = await probe.border()
    except MeasureError as error:
        why = str(error)
    if sizes_sms is not None:
        why = ""
        if not sees:
            why = f"{application.model} reads no images"
        elif len(sizes_sms) < 2:
            why = "the decoder has no SMs to divide (sm_slots of its tier, on a GPU)"
        elif len(sizes_sms) < 3:
            why = "the decoder's SMs divide in one way; give its tier more sm_slots"
    if not why:
        return sizes_sms or []
    console.print(f"Stages were not measured: {why}.", highlight=False)
    return []


async def _stages(
    probe: Probe, repeat: _Repetitions, sizes_sms: list[int], longest: int, output_tokens: float
) -> StageCurves | None:
    """Measure encodes and prefills at each place of the border, but where decodes have all SMs."""
    if not sizes_sms:
        return None
    usual = {
        "encode": {"pixels": _STAGE_PIXELS},
        "prefill": {"tokens": min(_STAGE_TOKENS, longest // 2)},
    }
    try:
        for stage, sent in usual.items():
            calls = [partial(probe.stage, one, longest, **sent) for one in sizes_sms[:-1]]
            await repeat(f"stage_{stage}", f"{stage}s beside decodes", calls)
    except (MeasureError, fit.FitError) as error:
        console.print(f"Stages were not measured: {error}.", highlight=False)
        return None
    finally:
        # Without this the border is free two minutes later.
        with suppress(MeasureError):
            await probe.border()
    encodes, prefills = (repeat.points[f"stage_{stage}"] for stage in usual)
    return fit.stage_curves(encodes, prefills, sizes_sms[-1], output_tokens)


async def _measure_cap(
    url: str, known: Profile, repetitions: _Repetitions, largest_batch: int, *probing: Any
) -> CappedPower:
    """Measure power and slowdowns under the cap that is set now, against a profile's curves.

    Raises `NoDraw`: power cannot be measured; `ProfileError`: the profile is not measured, of
    another model or version, or the cap is not lower than its own.
    """
    if known.origin != "measured":
        raise ProfileError(f"profile {known.name} is not measured; measure one without --add-cap")
    application = await find_application(url)
    known.require_serves(application.model, engine_versions())
    meter = DrawMeter(url)
    # Refuse before anything is measured.
    with_power(known, known.power_at(None).model_copy(update={"cap_w": await meter.limit_w()}))
    longest = known.prefill.longest_tokens or _LONGEST_TOKENS
    grid = make_grid(longest, application.decoder.capacity_tokens, largest_batch)
    async with Probe(application, *probing) as probe:
        with repetitions.of(len(grid.cold) + len(grid.appends) + len(grid.decodes)) as repeat:
            await _measure_alone(probe, grid, repeat)
        drawn = await _drawn(meter, probe, grid)
    cold = [point for point in repeat.points["prefill"] if not point.cached_tokens]
    decodes = repeat.points["decode"]
    prefill_s = [known.prefill.seconds(one.new_tokens, 0) for one in cold]
    step_s = [known.decode.step_s(one.sequences, one.kv_tokens) for one in decodes]
    return drawn.model_copy(
        update={
            "prefill_slowdown": fit.fit_slowdown(cold, prefill_s),
            "decode_slowdown": fit.fit_slowdown(decodes, step_s),
        }
    )


def _prepare(out: Path) -> None:
    """Check that a profile, or a refused one's points, can be written; raises `ProfileError`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(f"profile {out} cannot be written: {error.strerror}") from None
    if out.is_dir():
        raise ProfileError(f"profile {out} cannot be written: it is a folder; name a file in it")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ProfileError(f"profile {out} cannot be written: permission denied")


def _batched_tokens(
    application: Application, given: int | None
) -> dict[Literal["prefiller", "decoder", "collocated"], int]:
    """Return the most tokens of a step, by role, where they are known."""
    prefiller, decoder = (
        one.batched_tokens if given is None else given
        for one in (application.prefiller, application.decoder)
    )
    # If both are alike, so is an engine that does the work of both.
    collocated = prefiller if prefiller == decoder else None
    found: dict[Literal["prefiller", "decoder", "collocated"], int | None] = {
        "prefiller": prefiller, "decoder": decoder, "collocated": collocated,
    }  # fmt: skip
    return {role: most for role, most in found.items() if most is not None}


async def _power(url: str, probe: Probe, grid: Grid) -> tuple[CappedPower, ...]:
    """Measure draws under the limit that is set; print why if that is not possible."""
    try:
        return (await _drawn(DrawMeter(url), probe, grid),)
    except NoDraw as reason:
        console.print(f"Power was not measured: {reason}.", highlight=False)
        return ()


async def _drawn(meter: DrawMeter, probe: Probe, grid: Grid) -> CappedPower:
    # With short contexts and long outputs, little of the work is prefill.
    sequences, context_tokens = max(grid.decodes, key=lambda one: (one[0], -one[1]))
    decode = partial(probe.decode, sequences, context_tokens, grid.cold[-1] // 2)
    with console.status("power: idle, prefill, decode, a minute in all"):
        return await measure_power(meter, partial(probe.cold_prefill, grid.cold[-1]), decode)


def _median(points: list[Any]) -> Any:
    """Return a point with the medians of the repetitions' times."""
    names = [name for name in ("seconds", "engines_s", "step_s") if hasattr(points[0], name)]
    medians = {name: statistics.median(getattr(one, name) for one in points) for name in names}
    return replace(points[0], **medians)


def _embedded_kv_bytes_per_token(application: Application) -> float:
    if application.model != "conserve-embedded":
        raise MeasureError(
            f"how much KV a token of {application.model} takes is not known here; give "
            "--kv-bytes-per-token (layers x 2 x KV heads x head size x bytes of a number)"
        )
    config = json.loads((model_path() / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    # The last factor is the bytes of bfloat16, its default.
    return float(config["num_hidden_layers"] * 2 * heads * 2)


# --- What is shown --------------------------------------------------------------------------------


def _show(made: Profile) -> None:
    table = Table(title=f"profile {made.name} of {made.model}", box=box.SIMPLE_HEAD)
    for heading in ("curve", "seconds", "R^2", "typically off", "at worst", "points"):
        table.add_column(heading, justify="left" if heading in ("curve", "seconds") else "right")
    prefill, decode, handoff, overhead = made.prefill, made.decode, made.handoff, made.overhead
    cold = f"{prefill.constant_s:.3g} + {prefill.per_token_s:.3g} n"
    cold += f" + {prefill.per_token_squared_s:.3g} n²"
    append = f"{prefill.append_constant_s:.3g} + the same, n² to (c+n)²-c²"
    append += f", + {prefill.per_cached_token_s:.3g} c"
    step = (
        f"{decode.constant_s:.3g} + {decode.per_sequence_s:.3g} b + {decode.per_kv_token_s:.3g} k"
    )
    beside = f"decode step + {made.interference.prefill_share:.2f} of the append's own"
    moved = f"{handoff.constant_s:.3g} + {handoff.per_token_s:.3g} n"
    first = f"+ {overhead.direct_s:.3g}, + {overhead.handed_off_s:.3g} if handed off"
    rows = [
        ("prefill, n tokens", cold, prefill.quality),
        ("append after c cached", append, prefill.cached_quality),
        ("decode step, b sequences, k KV", step, decode.quality),
        ("append beside decodes", beside, made.interference.quality),
        ("handoff, n tokens", moved, handoff.quality),
        ("a turn's first token", first, overhead.quality),
    ]
    if made.encoding is not None:
        formula = f"prefill + {made.encoding.per_token_s:.3g} e"
        rows.append(("image of e embeddings", formula, made.encoding.quality))
    for curve, formula, quality in rows:
        table.add_row(curve, formula, *(() if quality is None else _cells(quality)))
    console.print(table)
    if made.stages is not None:
        count = len(made.stages.sizes)
        console.print(f"Stages: {count} sizes (conserve plan --stages).", highlight=False)
    for power in made.power:
        console.print(f"Power under {power.cap_w:g} W: {_draws(power)}.", highlight=False)
    console.print(
        f"KV: {made.kv_capacity_tokens:,} tokens an engine, {handoff.bytes_per_token:,.0f} bytes "
        "each.",
        highlight=False,
    )


def _cells(quality: Quality) -> tuple[str, ...]:
    return (
        f"{quality.r_squared:.4f}",
        f"{quality.typical_residual_share:.1%}",
        f"{quality.worst_residual_share:.0%}",
        str(quality.points),
    )


def _show_cap(known: Profile, points: dict[str, list[Any]], capped: CappedPower) -> None:
    """Print each point's time under the cap over the profile's (ConServe, figures 7 and 8)."""
    title = f"{capped.cap_w:g} W against {known.power_at(None).cap_w:g} W: times as long"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("measured")
    table.add_column("times", justify="right")
    for point in points["prefill"]:
        after = f" after {point.cached_tokens:,} cached" if point.cached_tokens else ""
        times = point.seconds / known.prefill.seconds(point.new_tokens, point.cached_tokens)
        table.add_row(f"prefill of {point.new_tokens:,} tokens{after}", f"{times:.2f}")
    for step in points["decode"]:
        times = step.seconds / known.decode.step_s(step.sequences, step.kv_tokens)
        what = f"decode step of {step.sequences} with {step.kv_tokens:,} tokens of KV"
        table.add_row(what, f"{times:.2f}")
    console.print(table)
    console.print(
        f"Recorded: prefills take {capped.prefill_slowdown:.2f} times as long, decode steps "
        f"{capped.decode_slowdown:.2f}; {_draws(capped)}.",
        highlight=False,
    )


def _draws(power: CappedPower) -> str:
    draws = {"idle": power.idle_w, "prefill": power.prefill_w, "decode": power.decode_w}
    return ", ".join(f"{phase} {watts:.0f} W" for phase, watts in draws.items())


def with_power(profile: Profile, power: CappedPower) -> Profile:
    """Return the profile with a lower cap than its highest one, in place of what it had of it.

    Raises `ProfileError` if the profile has no power, or the cap is not lower.
    """
    highest = profile.power_at(None)
    if power.cap_w >= highest.cap_w:
        raise ProfileError(
            f"profile {profile.name} was measured under {highest.cap_w:g} W, and "
            f"{power.cap_w:g} W are set now; set a lower cap to add it"
        )
    others = [one for one in profile.power if one.cap_w != power.cap_w]
    caps = sorted([*others, power], key=lambda one: one.cap_w, reverse=True)
    return profile.model_copy(update={"power": tuple(caps)})


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON; raises `ProfileError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be written: {error.strerror}") from None
