"""``conserve plan --from``: today's deployment and others, simulated on what was recorded of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from autoscale.capacity.profile import Profile, ProfileError, load_profile
from conserve_cli.output import console
from conserve_lab.cli.output import can_draw, make_folder, progress_bar
from conserve_lab.latencies import LABELS
from conserve_lab.metrics import Tally
from conserve_lab.selection import Selection
from conserve_lab.simulate.run import NAMES, EngineCounts, make_system, serve
from conserve_lab.simulate.system import SimulationError
from conserve_lab.workloads import Workload, traces
from conserve_lab.workloads.files import Skipped, recordings
from conserve_lab.workloads.plan import WorkloadError
from conserve_lab.workloads.recorded import recorded_sessions
from conserve_lab.workloads.recordings import Head, read_turns

_SYSTEMS = {"conversation": "conserve", "elastic": "elastic", "collocated": "collocated"}
_PARKING = {"conversation": "parking"}
_BLOCK_TOKENS, _CHUNK_TOKENS, _CPU_TOKENS = 16, 256, 128
_SHOWN = ("ttft", "ttfet")


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of a run, recorded or simulated: seconds by metric, and tokens."""

    seconds: Mapping[str, list[float]]
    output_tokens_per_s: float
    found_share: float | None

    def figures(self) -> Iterator[tuple[str, float, str]]:
        """Yield each figure with its name and form."""
        for metric in _SHOWN:
            for share in (50, 95) if self.seconds.get(metric) else ():
                value = float(np.percentile(self.seconds[metric], share))
                yield f"{LABELS[metric]} p{share}", value, "{:.3f} s"
        yield "output tokens a second", self.output_tokens_per_s, "{:,.1f}"
        if self.found_share is not None:
            yield "prompt tokens found", self.found_share, "{:.1%}"


class Recorded:
    """A recording: what was deployed, what was seen, and the sessions.

    Raises WorkloadError: it is none, or has no turns.
    """

    def __init__(self, file: Path, skip_bad: bool) -> None:
        skipped: Skipped = [] if skip_bad else None
        self.head, told = read_turns(recordings(file, skipped), skipped)
        self.turns = [turn for turn, _ in told if turn.prompt_tokens]
        if not self.turns:
            raise WorkloadError(f"{file} has no turns; record while the application serves some")
        self.file, self.sessions = file, len(recorded_sessions(file, skipped))
        began_s = min(turn.at for turn in self.turns)
        self.lasted_s = max(0.001, max(one.at + one.latency_s for one in self.turns) - began_s)
        self.rate_per_s = self.sessions / self.lasted_s
        self.skip_bad = skip_bad or None

    def workload(self) -> Workload:
        selection = Selection(
            "recorded", self.sessions, pattern="recorded", data=self.file, skip_bad=self.skip_bad
        )
        return selection.workload()

    def seen(self) -> Seen:
        done = [turn for turn in self.turns if turn.outcome == "completed"]
        seconds = {
            metric: [one for turn in done if (one := getattr(turn, f"{metric}_s")) is not None]
            for metric in _SHOWN
        }
        found = sum(turn.decoder_cached_tokens + turn.lmcache_tokens for turn in done)
        found -= sum(turn.remote_tokens for turn in done)
        prompts = sum(turn.prompt_tokens for turn in done)
        output = sum(turn.output_tokens for turn in done)
        return Seen(seconds, output / self.lasted_s, found / prompts if prompts else None)

    def engines(self) -> tuple[int, int]:
        """Return how many prefillers and decoders there were."""
        roles = [role for role, *_ in self.head.engines]
        return roles.count("prefiller"), max(1, roles.count("decoder"))

    def profile(self, profile: Profile) -> Profile:
        """Return a profile with the KV space that engines had."""
        capacity = max((tokens for _, hosts, tokens, _ in self.head.engines if hosts), default=0)
        return profile.model_copy(update={"kv_capacity_tokens": capacity}) if capacity else profile

    def simulated(self, profile: Profile, prefillers: int, decoders: int) -> Seen:
        """Simulate engines of a profile on the recorded sessions; raises `SimulationError`."""
        name = _SYSTEMS.get(self.head.placement, self.head.placement)
        on_cpu = not profile.hardware.get("gpus") and profile.hardware.get("cpu") is not None
        options: dict[str, Any] = {
            "block_tokens": _CPU_TOKENS if on_cpu else _BLOCK_TOKENS,
            "handoff_chunk_tokens": _CPU_TOKENS if on_cpu else _CHUNK_TOKENS,
        }
        host_tokens = max((tokens for *_, tokens in self.head.engines), default=0)
        parking = _PARKING.get(self.head.placement, f"{name}_parking")
        if self.head.parks and host_tokens and parking in NAMES:
            name, options["host_tokens"] = parking, host_tokens
        system = make_system(name, profile, EngineCounts(prefillers, decoders), **options)
        tally = Tally(keep_samples=True)
        serve(system, self.workload(), tally.add)
        result = tally.result()
        samples = {
            metric: [one for values in tally.samples[metric].values() for one in values]
            for metric in _SHOWN
            if tally.samples is not None
        }
        return Seen(samples, result.output_tokens_per_s, result.cached_share)


def show_own_traffic(
    recorded: Recorded, today: Profile, others: Mapping[str, Profile], out: Path | None
) -> None:
    """Print how far the simulation of today's deployment is off, and what others would do."""
    prefillers, decoders = recorded.engines()
    wanted = {
        _counted(prefillers, decoders): (today, prefillers, decoders),
        "one decoder more": (today, prefillers, decoders + 1),
        **({"one decoder fewer": (today, prefillers, decoders - 1)} if decoders > 1 else {}),
        **{f"on {name}": (one, prefillers, decoders) for name, one in others.items()},
    }
    runs: dict[str, Seen | str] = {}
    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(wanted))
        for name, engines in wanted.items():
            try:
                runs[name] = recorded.simulated(*engines)
            except SimulationError as error:
                runs[name] = str(error)
            bar.advance(task)
    seen, now = recorded.seen(), next(iter(runs.values()))
    if isinstance(now, str):
        raise SimulationError(now)
    turns, lasted = f"{len(recorded.turns):,} turns", f"{recorded.lasted_s:,.0f} s"
    title = f"{turns} of {recorded.sessions:,} sessions in {lasted}"
    check = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("", "recorded", "simulated", "error"):
        check.add_column(column, justify="right" if column else "left", no_wrap=True)
    simulated = {name: value for name, value, _ in now.figures()}
    for name, value, form in seen.figures():
        other = simulated.get(name)
        off = "" if other is None or not value else f"{other / value - 1:+.1%}"
        check.add_row(name, form.format(value), "" if other is None else form.format(other), off)
    console.print(check)
    table = Table(title="simulated", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("engines")
    columns = [name for name, _, _ in now.figures()]
    for column in columns:
        table.add_column(column, justify="right")
    for name, run in runs.items():
        cells = (
            {} if isinstance(run, str) else {one: form.format(v) for one, v, form in run.figures()}
        )
        table.add_row(name, *(cells.get(column, "-") for column in columns))
    console.print(table)
    for name, run in runs.items():
        if isinstance(run, str):
            console.print(f"[yellow]Not possible, {escape(name)}:[/yellow] {escape(run)}.")
    if out is not None and can_draw():
        from conserve_lab.plots import distribution, save

        make_folder(out)
        drawn = {"recorded": seen} | {
            name: run for name, run in runs.items() if isinstance(run, Seen)
        }
        for metric in _SHOWN:
            curves = {
                name: run.seconds[metric] for name, run in drawn.items() if run.seconds[metric]
            }
            if curves:
                save(distribution(curves, LABELS[metric]), out, f"own-{metric}")


def profiles_of(recorded: Recorded, given: str | None) -> tuple[Profile, dict[str, Profile]]:
    """Return today's profile, and another one that was asked for; raises `ProfileError`."""
    named = (recorded.head.profile or given or "").removesuffix(".json")
    if not named:
        raise ProfileError("the recording names no profile; give that of its engines: --profile")
    try:
        today = load_profile(named)
    except ProfileError:
        if given is None:
            raise
        today = load_profile(given)
    today.require_serves(recorded.head.model, {})
    other = load_profile(given) if given is not None else today
    return today, {} if other.name == today.name else {other.name: other}


def export_weka(recorded: Recorded, folder: Path) -> None:
    """Write each session as a file of its own, as AIPerf reads ``weka_trace``."""
    make_folder(folder)
    for session in (read() for read in recorded_sessions(recorded.file).values()):
        (folder / f"{session.name}.json").write_text(json.dumps(_weka(session, recorded.head)))
    console.print(f"{recorded.sessions:,} sessions are in {escape(str(folder))}.", highlight=False)


def _weka(session: traces.RecordedSession, head: Head) -> dict[str, Any]:
    numbers: dict[int, int] = {}
    about = {"id": session.name, "models": [head.model], "block_size": session.block_tokens}
    return about | {"hash_id_scope": "local"} | _agent(session, numbers)


def _agent(session: traces.RecordedSession, numbers: dict[int, int]) -> dict[str, Any]:
    """Return an agent's records; a digest becomes a number that is the session's own."""
    made: list[dict[str, Any]] = []
    ids: list[int] = []
    for turn, call in enumerate(session.calls):
        new = [numbers.setdefault(one, len(numbers) + 1) for one in call.new_blocks.tolist()]
        ids = [*ids[: call.kept_blocks], *new]
        whole = len(ids) == call.prompt_tokens // session.block_tokens
        made.append({
            "t": round(call.started_s, 3), "type": "n", "in": call.prompt_tokens,
            "out": call.output_tokens, "hash_ids": ids if whole else [], "tool": call.tool or None,
            "stop": "end_turn" if call.effective else "tool_use",
            "api_time": round(call.took_s, 3),
        })  # fmt: skip
        for sub in (one for one in session.sub_agents if one.after == turn):
            ended_s = sub.ended_s
            made.append({
                "t": round(sub.started_s if ended_s is None else ended_s, 3), "type": "subagent",
                "agent_id": sub.session.name, **_agent(sub.session, numbers),
                "duration_ms": None if ended_s is None else round((ended_s - sub.started_s) * 1e3),
            })  # fmt: skip
    tokens = session.begins[-1].tokens if session.begins else 0
    return {"tool_tokens": 0, "system_tokens": tokens, "requests": made}


def _counted(prefillers: int, decoders: int) -> str:
    return f"today: {prefillers} + {decoders}" if prefillers else f"today: {decoders}"
