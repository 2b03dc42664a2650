"""``conserve plan --from``: today's deployment and others, simulated on what was recorded of it."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from autoscale.capacity.profile import Profile, ProfileError, load_profile
from conserve_cli.output import console
from conserve_lab.cli.output import can_draw, make_folder, progress_bar
from conserve_lab.latencies import LABELS
from conserve_lab.metrics import Tally
from conserve_lab.selection import Selection
from conserve_lab.simulate.run import NAMES, EngineCounts, make_system, serve
from conserve_lab.workloads import Workload, traces
from conserve_lab.workloads.files import Skipped, recordings
from conserve_lab.workloads.plan import WorkloadError
from conserve_lab.workloads.recorded import recorded_sessions
from conserve_lab.workloads.recordings import read_turns

_SYSTEMS = {"conversation": "conserve", "elastic": "elastic", "collocated": "collocated"}
_PARKING = {"conversation": "parking"}
# Of a block and of a chunk that is handed off, as engines have them.
_GPU_TOKENS, _CPU_TOKENS = (16, 256), (128, 128)
_SHOWN = ("ttft", "ttfet")


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of a run, recorded or simulated: seconds by metric, and tokens."""

    seconds: Mapping[str, list[float]]
    output_tokens_per_s: float
    found_share: float | None

    def figures(self) -> dict[str, tuple[float, str]]:
        """Return each figure by its name, and as it is shown."""
        found = {}
        for metric in _SHOWN:
            for share in (50, 95) if self.seconds[metric] else ():
                value = float(np.percentile(self.seconds[metric], share))
                found[f"{LABELS[metric]} p{share}"] = value, f"{value:.3f} s"
        speed, found_share = self.output_tokens_per_s, self.found_share or 0.0
        found["output tokens a second"] = speed, f"{speed:,.1f}"
        return found | {"prompt tokens found": (found_share, f"{found_share:.1%}")}


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
        prompts = max(1, sum(turn.prompt_tokens for turn in done))
        output = sum(turn.output_tokens for turn in done)
        return Seen(seconds, output / self.lasted_s, found / prompts)

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
        block, chunk = _CPU_TOKENS if on_cpu else _GPU_TOKENS
        options: dict[str, Any] = {"block_tokens": block, "handoff_chunk_tokens": chunk}
        host_tokens = self.head.nodes * max((tokens for *_, tokens in self.head.engines), default=0)
        parking = _PARKING.get(self.head.placement, f"{name}_parking")
        if self.head.parks and host_tokens and parking in NAMES:
            name, options["host_tokens"] = parking, host_tokens
        system = make_system(name, profile, EngineCounts(prefillers, decoders), **options)
        tally = Tally(keep_samples=True)
        serve(system, self.workload(), tally.add)
        result = tally.result()
        samples = tally.samples or {}
        seconds = {metric: [*chain(*samples[metric].values())] for metric in _SHOWN}
        return Seen(seconds, result.output_tokens_per_s, result.cached_share)


def show_own_traffic(
    recorded: Recorded, today: Profile, others: Mapping[str, Profile], out: Path | None
) -> None:
    """Print how far the simulation of today's deployment is off, and what others would do."""
    prefillers, decoders = recorded.engines()
    wanted = {
        f"today: {prefillers} + {decoders}": (today, prefillers, decoders),
        "one decoder more": (today, prefillers, decoders + 1),
        **({"one decoder fewer": (today, prefillers, decoders - 1)} if decoders > 1 else {}),
        **{f"on {name}": (one, prefillers, decoders) for name, one in others.items()},
    }
    with progress_bar() as bar:
        simulating = bar.track(wanted.items(), description="simulating")
        runs = {name: recorded.simulated(*engines) for name, engines in simulating}
    seen, now = recorded.seen(), next(iter(runs.values())).figures()
    turns, lasted = f"{len(recorded.turns):,} turns", f"{recorded.lasted_s:,.0f} s"
    title = f"{turns} of {recorded.sessions:,} sessions in {lasted}"
    check = _table(title, ["recorded", "simulated", "error"])
    for name, (value, shown) in seen.figures().items():
        other, simulated = now.get(name, (math.nan, ""))
        off = f"{other / value - 1:+.1%}" if value and simulated else ""
        check.add_row(name, shown, simulated, off)
    console.print(check)
    table = _table("simulated", now)
    for engines_name, run in runs.items():
        table.add_row(engines_name, *(run.figures().get(name, (0.0, "-"))[1] for name in now))
    console.print(table)
    if out is not None and can_draw():
        from conserve_lab.plots import distribution, save

        make_folder(out)
        drawn = {"recorded": seen, **runs}
        for metric in _SHOWN:
            curves = {name: of for name, run in drawn.items() if (of := run.seconds[metric])}
            if curves:
                save(distribution(curves, LABELS[metric]), out, f"own-{metric}")


def _table(title: str, columns: Iterable[str]) -> Table:
    figures = (Column(one, justify="right") for one in columns)
    return Table("", *figures, title=title, box=box.SIMPLE_HEAD, title_justify="left")


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
        about = {"id": session.name, "block_size": session.block_tokens, "hash_id_scope": "local"}
        about |= _agent(session, recorded.head.model, {}, 0.0)
        (folder / f"{session.name}.json").write_text(json.dumps(about))
    console.print(f"{recorded.sessions:,} sessions are in {escape(str(folder))}.", highlight=False)


def _agent(
    session: traces.RecordedSession, model: str, numbers: dict[int, int], began_s: float
) -> dict[str, Any]:
    """Return an agent's records, timed from its session's start.

    A digest becomes a number that is the session's own. AIPerf reads no sub-agents of sub-agents:
    they stand behind the one that began them.
    """
    made: list[dict[str, Any]] = []
    ids: list[int] = []
    for turn, call in enumerate(session.calls):
        new = [numbers.setdefault(one, len(numbers) + 1) for one in call.new_blocks.tolist()]
        ids = [*ids[: call.kept_blocks], *new]
        whole = len(ids) == call.prompt_tokens // session.block_tokens
        made.append({
            "t": round(began_s + call.started_s, 3), "type": "n", "model": model,
            "in": call.prompt_tokens, "out": call.output_tokens, "hash_ids": ids if whole else [],
            "stop": "end_turn" if call.effective else "tool_use",
            "api_time": round(call.took_s, 3),
        })  # fmt: skip
        for sub in (one for one in session.sub_agents if one.after == turn):
            at_s, ended_s = began_s + sub.started_s, sub.ended_s
            found = _agent(sub.session, model, numbers, at_s)
            calls = [one for one in found["requests"] if one["type"] == "n"]
            made.append({
                **found, "t": round(at_s, 3), "type": "subagent", "agent_id": sub.session.name,
                "duration_ms": None if ended_s is None else round((ended_s - sub.started_s) * 1e3),
                "status": "async_launched" if ended_s is None else "completed",
                "subagent_type": "agent", "requests": calls,
            })  # fmt: skip
            made += [one for one in found["requests"] if one["type"] != "n"]
    # AIPerf reads what prompts begin with from the first one's blocks.
    known = len(made[0]["hash_ids"]) * session.block_tokens
    tokens = min(known, session.begins[-1].tokens) if session.begins else 0
    return {"models": [model], "system_tokens": tokens, "requests": made}
