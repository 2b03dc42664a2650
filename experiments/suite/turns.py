"""Has systems take turns: in rounds where several are up at once, else one start after another."""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from conserve_lab.client import Endpoint, EndpointError, with_model
from conserve_lab.compare import Comparison, compare, write_comparisons
from conserve_lab.driver import DriveOptions, Run, drive, unloaded
from conserve_lab.measure import (
    MeasurementSettings,
    measure,
    measure_unloaded,
    report_of_starts,
)
from conserve_lab.peers import PeerUnavailable
from conserve_lab.records import Answer, RecordWriter, Script, TurnRequest
from conserve_lab.report import Report, write_report
from conserve_lab.rounds import Alternation, orders
from conserve_lab.selection import Selection
from experiments.suite.fleet import Fleet, Variant

_UNLOADED_CONVERSATIONS = 5
_TURN_TIMEOUT_S = 120.0
_IDLE_S = 30.0
# First conversations cost an engine more than later ones; these come before the measurement.
_WARM_UP_CONVERSATIONS = 2
_WARM_UP_SEED_SHIFT = 500_009


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A system that could not be measured, and why."""

    system: str
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Systems that took turns with each other.

    Attributes:
        group: its number; what comes later with the same number takes its place.
        why: why they took turns as they did.
        reports: by rate, each rate's in the same order; ratios are relative to the first system.
        idle_cores: how many cores each that was up kept busy without requests.
    """

    group: int
    why: str
    reports: list[list[Report]]
    idle_cores: dict[str, float] = field(default_factory=dict)

    def comparisons(self) -> list[list[Comparison]]:
        """By rate, every other system against the first."""
        return [compare(reports) for reports in self.reports]


@dataclass(frozen=True, slots=True)
class Plan:
    """Tells what to measure.

    Attributes:
        variants: the systems; the first gives the rates and the bounds, unless the rates are given.
        base: name of the system that ratios are relative to.
        loads: rates, as shares of the highest.
        selection: the conversations of a round.
        rounds: how many rounds, or starts, each system has.
        out: folder for reports.
        rates_per_s: conversations a second, in place of ``loads``.
    """

    variants: list[Variant]
    base: str
    loads: Sequence[float]
    selection: Selection
    rounds: int
    out: Path
    rates_per_s: Sequence[float] = ()


class Comparing:
    """Measures all systems of a plan, as many at a time as there is memory for.

    Args:
        tell: called with what is being done.
    """

    def __init__(self, plan: Plan, fleet: Fleet, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._fleet = fleet
        self._tell = tell
        (self._base,) = [one for one in plan.variants if one.name == plan.base]
        self._waiting = [one for one in plan.variants if one is not self._base]
        self._group = 0
        self._rates_per_s: list[float] = []
        self._unloaded: Report | None = None

    def run(self) -> Iterator[Measured | Unavailable]:
        """Measure; yields what came of it, as soon as it is there.

        Raises:
            PeerUnavailable: a system that the others are relative to cannot run here.
            EndpointError: one that was up does not answer.
        """
        self._prepare(self._base if self._plan.rates_per_s else self._plan.variants[0])
        measured = False
        while self._waiting or not measured:
            why = yield from self._start_what_fits()
            here = [one for one in self._waiting if one.name in self._fleet.up]
            if self._waiting and (not here or self._base.name not in self._fleet.up):
                yield from self._starts(why)
                return
            yield self._rounds([self._base, *here], why)
            measured = True
            self._fleet.stop([one.name for one in here])
            self._waiting = [one for one in self._waiting if one not in here]

    def _prepare(self, first: Variant) -> None:
        plan = self._plan
        self._start_needed(first)
        endpoint = self._fleet.endpoint(first.name)
        self._rates_per_s = list(plan.rates_per_s)
        if not self._rates_per_s:
            highest_per_s = asyncio.run(sustained_rate(endpoint, plan.selection, plan.rounds))
            self._tell(f"the prefiller gets {highest_per_s:.3g} conversations/s done")
            # As many digits as are shown.
            self._rates_per_s = [float(f"{load * highest_per_s:.4g}") for load in plan.loads]
        settings = replace(self._settings([first], 0.0), unloaded=_UNLOADED_CONVERSATIONS)
        self._unloaded = asyncio.run(measure_unloaded(settings))
        # It has worked: what it has now is what others will come to.
        self._fleet.look()

    def _start_needed(self, variant: Variant) -> None:
        try:
            self._start(variant)
        except PeerUnavailable as error:
            raise PeerUnavailable(f"{variant.name}, which all is relative to: {error}") from None

    def _start(self, variant: Variant) -> None:
        self._fleet.start(variant)
        try:
            asyncio.run(warm_up(self._fleet.endpoint(variant.name), self._plan.selection))
        except EndpointError as error:
            self._fleet.stop([variant.name])
            raise PeerUnavailable(str(error)) from None
        except PeerUnavailable:
            self._fleet.stop([variant.name])
            raise

    def _start_what_fits(self) -> Generator[Unavailable, None, str]:
        """Start the base and what waits, as long as there is memory; returns why it ended."""
        if self._base.options.gpu:
            return "each system's engines take whole GPUs"
        why = "there is no other system"
        for variant in (self._base, *self._waiting):
            if variant.name in self._fleet.up:
                continue
            room = self._fleet.room()
            why = room.told()
            self._tell(why)
            if not room.fits:
                break
            if variant is self._base:
                self._start_needed(variant)
                continue
            try:
                self._start(variant)
            except PeerUnavailable as error:
                self._waiting = [one for one in self._waiting if one is not variant]
                yield self._unavailable(variant, error)
        return why

    def _unavailable(self, variant: Variant, error: Exception) -> Unavailable:
        self._tell(f"{variant.name}: {error}")
        return Unavailable(variant.name, str(error))

    def _settings(self, variants: list[Variant], rate_per_s: float) -> MeasurementSettings:
        mark = secrets.token_hex(4)
        return MeasurementSettings(
            endpoints=[self._fleet.endpoint(one.name) for one in variants],
            selection=replace(self._plan.selection, rate_per_s=rate_per_s or 1.0),
            options=DriveOptions(
                turn_timeout_s=_TURN_TIMEOUT_S, cache_salt=mark, id_prefix=f"bench-{mark}-"
            ),
            rounds=self._plan.rounds,
            unloaded=0,
            reference=self._unloaded,
        )

    # --- All up at once ---------------------------------------------------------------------------

    def _rounds(self, variants: list[Variant], why: str) -> Measured:
        idle_cores = self._fleet.idle_cores(_IDLE_S)
        reports = []
        for rate_per_s in self._rates_per_s:
            names = ", ".join(one.name for one in variants)
            self._tell(f"{self._plan.rounds} rounds of {names} at {rate_per_s:.3g}/s")
            settings = self._settings(variants, rate_per_s)
            if len(variants) == 1:
                # Alone it takes no turns, so it has all conversations in one run.
                count = self._plan.rounds * settings.selection.conversations
                alone = replace(settings.selection, conversations=count)
                settings = replace(settings, selection=alone)
            folder = self._folder(rate_per_s)
            with RecordWriter(folder / "records.jsonl") as writer:
                found = asyncio.run(measure(settings, on_record=writer.write))
            reports.append(found.reports)
            self._write(found.reports, folder)
            self._fleet.look()
        self._group += 1
        return Measured(self._group, why, reports, idle_cores)

    def _folder(self, rate_per_s: float) -> Path:
        ending = f"-group-{self._group + 1}" if self._group else ""
        folder = self._plan.out / f"at-{rate_per_s:.3g}{ending}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, reports: list[Report], folder: Path) -> None:
        for report in reports:
            write_report(report, folder / f"{report.system}.json")
        write_comparisons(compare(reports), folder / "comparison.json")

    # --- One at a time ----------------------------------------------------------------------------

    def _starts(self, why: str) -> Iterator[Measured | Unavailable]:
        plan = self._plan
        variants = {one.name: one for one in (self._base, *self._waiting)}
        order = orders(list(variants), plan.rounds, plan.selection.seed)
        settings: dict[float, MeasurementSettings] = {}
        runs: dict[tuple[float, str], list[Run]] = defaultdict(list)
        done: list[list[str]] = []
        self._fleet.stop(self._fleet.up)
        for number, names in enumerate(order):
            for name in [name for name in names if name in variants]:
                self._tell(f"start {number + 1} of {len(order)}: {name}")
                try:
                    self._start(variants[name])
                except PeerUnavailable as error:
                    if name == plan.base:
                        raise PeerUnavailable(f"{name}, which ratios are to: {error}") from None
                    yield self._unavailable(variants.pop(name), error)
                    continue
                for rate_per_s in self._rates_per_s:
                    settings.setdefault(rate_per_s, self._settings([variants[name]], rate_per_s))
                    run = asyncio.run(self._once(name, settings[rate_per_s], number))
                    runs[rate_per_s, name].append(run)
                self._fleet.look()
                self._fleet.stop([name])
            done.append(names)
            left = [[name for name in names if name in variants] for names in done]
            alternation = Alternation("starts", plan.selection.seed, left)
            reports = []
            for rate_per_s, own in settings.items():
                of_rate = [
                    report_of_starts(own, runs[rate_per_s, name], alternation) for name in variants
                ]
                self._write(of_rate, self._folder(rate_per_s))
                reports.append(of_rate)
            yield Measured(self._group + 1, why, reports)

    async def _once(self, name: str, settings: MeasurementSettings, number: int) -> Run:
        options = settings.options
        mark = f"{number}-{name}-"
        with RecordWriter(
            self._folder(settings.selection.rate_per_s) / f"records-{name}-{number}.jsonl"
        ) as writer:
            return await drive(
                self._fleet.endpoint(name),
                settings.selection.workload(seed_shift=number),
                replace(
                    options,
                    id_prefix=options.id_prefix + mark,
                    cache_salt=f"{mark}{options.cache_salt}",
                ),
                on_record=writer.write,
                proven=True,
            )


# --- Before a measurement -------------------------------------------------------------------------


async def warm_up(endpoint: Endpoint, selection: Selection) -> None:
    """Run some conversations that do not count.

    Raises:
        PeerUnavailable: none of their turns was completed.
        EndpointError: the first one was refused.
    """
    warming = replace(
        selection,
        seed=selection.seed + _WARM_UP_SEED_SHIFT,
        conversations=_WARM_UP_CONVERSATIONS,
        pattern="together",
        scale_gaps=0.0,
    )
    mark = f"warm-{time.time_ns()}-"
    run = await drive(endpoint, warming.workload(), DriveOptions(cache_salt=mark, id_prefix=mark))
    if not any(turn.outcome == "completed" for turn in run.records):
        raise PeerUnavailable(f"{endpoint.system}: no turn was completed while it was warmed up")


class _FirstTurn:
    """A conversation that ends with its first turn, one token long."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.conversation = script.conversation

    def next(self, answer: Answer | None) -> TurnRequest | None:
        turn = None if answer is not None else self._script.next(None)
        if turn is None:
            return None
        body = turn.body
        return replace(
            turn,
            body=lambda: {**body(), "min_tokens": 1, "max_tokens": 1},
            output_tokens=1,
        )


async def sustained_rate(endpoint: Endpoint, selection: Selection, rounds: int) -> float:
    """Sessions a second whose first turns, sub-agents' included, ConServe gets done in a row.

    Raises:
        PeerUnavailable: a turn failed.
        EndpointError: the first one was refused.
    """
    endpoint = await with_model(endpoint)
    salt, agents, turns_s = f"rate-{time.time_ns()}", 0, []
    # These are the very conversations that are measured later: others' prompts have another mean
    # length.
    for round_ in range(rounds):
        workload = selection.workload(seed_shift=round_)
        agents += workload.counts["conversations"]
        # The first ones also pay for what engines do once.
        parts = [("measured", None)] if round_ else [("warm", 2), ("measured", None)]
        for part, count in parts:
            mark = f"{salt}-{round_}-{part}-"
            scripts = (_FirstTurn(script) for _, script in islice(workload, count))
            run = await unloaded(endpoint, scripts, DriveOptions(cache_salt=mark, id_prefix=mark))
            if any(turn.outcome != "completed" for turn in run.records) or not run.records:
                raise PeerUnavailable("first turns failed while the prefiller's rate was measured")
        turns_s += [turn.ended_s - turn.sent_s for turn in run.records]
    mean_s = sum(turns_s) / len(turns_s)
    return 1 / (mean_s * agents / (rounds * selection.conversations))
