"""One measurement from beginning to end: the unloaded reference, the load, the reports."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from conserve_lab.client import Endpoint, with_model
from conserve_lab.driver import DriveOptions, Progress, Run, drive, unloaded
from conserve_lab.metrics import evaluate
from conserve_lab.objectives import Objectives, Reference, reference
from conserve_lab.records import TurnRecord
from conserve_lab.report import Report, make_report
from conserve_lab.rounds import Alternation, alternate, orders, pooled
from conserve_lab.selection import Selection
from conserve_lab.workloads import Workload, WorkloadError

OnProgress = Callable[[str, int, Progress], None]
"""Takes what runs, how many conversations it has in all, and how far it has come."""

# Without a salt, caches do not keep the unloaded run apart from the load; so its conversations are
# other ones than any round's.
_UNLOADED_SEED_SHIFT = 1_000_003


class Stopped(Exception):
    """The user ended it before there was anything to report."""


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """A measurement to make.

    Attributes:
        endpoints: one, or several to alternate between; the first is the baseline.
        rounds: how many rounds several endpoints have; each has other conversations.
        unloaded: how many conversations are run alone first, on the first endpoint.
        reference: a report whose unloaded reference is used instead.
        slo_multiple: bounds are this many times the unloaded latencies.
        kv_bytes_per_token: with it, bytes handed off are reported.
    """

    endpoints: list[Endpoint]
    selection: Selection
    options: DriveOptions
    rounds: int = 5
    unloaded: int = 3
    reference: Report | None = None
    slo_multiple: float = 5.0
    kv_bytes_per_token: float | None = None

    def check(self) -> None:
        """Find out early what is wrong with the workload or the reference, as a WorkloadError."""
        self.selection.workload()
        if self.reference is not None and self.reference.unloaded is None:
            raise WorkloadError(
                f"the reference, a report of {self.reference.system}, was made without an unloaded "
                "run; take another, or leave --reference out"
            )


@dataclass(frozen=True, slots=True)
class Measurement:
    runs: list[Run]
    reports: list[Report]
    interrupted: bool = False


async def measure(
    settings: MeasurementSettings,
    *,
    on_record: Callable[[TurnRecord], None] | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
) -> Measurement:
    """Run the unloaded reference, then the load, and report on each endpoint.

    Raises:
        Stopped: ``stop`` was set, and there is nothing to report.
        EndpointError, WorkloadError, ValueError: it cannot be measured; the message says why.
    """
    stop = stop or asyncio.Event()
    # All are asked first, so that none is found missing after minutes of measuring the others.
    named = [await with_model(endpoint) for endpoint in settings.endpoints]
    settings = replace(settings, endpoints=named)
    bounds = await _reference(settings, on_progress, stop)
    if stop.is_set():
        raise Stopped
    if len(settings.endpoints) > 1:
        return await _several(settings, bounds, on_record, on_progress, stop)
    endpoint, workload = settings.endpoints[0], settings.selection.workload()
    run = await drive(
        endpoint,
        workload,
        settings.options,
        on_record=on_record,
        on_progress=_about(on_progress, endpoint.system, workload.counts["conversations"]),
        stop=stop,
        proven=settings.reference is None and settings.unloaded > 0,
    )
    if not run.records:
        raise Stopped
    return Measurement([run], [_report(settings, run, *bounds)], interrupted=stop.is_set())


async def measure_unloaded(settings: MeasurementSettings) -> Report:
    """Run the unloaded reference alone, on the first endpoint, as the ``reference`` of others."""
    settings = replace(settings, endpoints=[await with_model(settings.endpoints[0])])
    run = await _unloaded_run(settings, None, asyncio.Event())
    return _report(settings, run, *_bounds(settings, run))


def report_of_starts(
    settings: MeasurementSettings, runs: Sequence[Run], alternation: Alternation
) -> Report:
    """Report on the runs of one system that was started several times, one a start.

    ``settings`` is what the runs had in common, with a ``reference``. Its endpoints are those of
    all systems that took turns; equal settings mark their reports as those of one comparison.
    """
    assert settings.reference is not None
    bounds = _given_reference(settings, settings.reference)
    return _report(settings, pooled(runs), *bounds, alternation)


def _report(
    settings: MeasurementSettings,
    run: Run,
    alone: Reference | None,
    floor: dict[str, float],
    alternation: Alternation | None = None,
) -> Report:
    counts = dict(settings.selection.workload().counts)
    return make_report(
        run,
        workload=settings.selection.describe() | {"counts": counts},
        arrivals=settings.selection.describe_arrivals(settings.options.concurrency),
        options=_described(settings, alternation),
        unloaded=alone,
        unloaded_violations=floor,
        slo_multiple=settings.slo_multiple,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        alternation=alternation,
    )


async def _several(
    settings: MeasurementSettings,
    bounds: tuple[Reference | None, dict[str, float]],
    on_record: Callable[[TurnRecord], None] | None,
    on_progress: OnProgress | None,
    stop: asyncio.Event,
) -> Measurement:
    def show(endpoint: Endpoint, round_: int, progress: Progress) -> None:
        if on_progress is not None:
            counts = settings.selection.workload(seed_shift=round_).counts
            what = f"round {round_ + 1} of {settings.rounds}: {endpoint.system}"
            on_progress(what, counts["conversations"], progress)

    by_system = await alternate(
        settings.endpoints,
        lambda round_: settings.selection.workload(seed_shift=round_),
        settings.rounds,
        settings.options,
        seed=settings.selection.seed,
        on_record=on_record,
        on_progress=show,
        stop=stop,
    )
    if not all(by_system.values()):
        raise Stopped
    runs = [pooled(of_rounds) for of_rounds in by_system.values()]
    whole = min(len(of_rounds) for of_rounds in by_system.values())
    seed = settings.selection.seed
    alternation = Alternation("rounds", seed, orders(list(by_system), whole, seed))
    reports = [_report(settings, run, *bounds, alternation) for run in runs]
    return Measurement(runs, reports, stop.is_set())


async def _reference(
    settings: MeasurementSettings, on_progress: OnProgress | None, stop: asyncio.Event
) -> tuple[Reference | None, dict[str, float]]:
    """Return the reference, and by how much its own run violates the bounds made of it."""
    if settings.reference is not None:
        return _given_reference(settings, settings.reference)
    if not settings.unloaded:
        return None, {}
    run = await _unloaded_run(settings, on_progress, stop)
    if stop.is_set():
        raise Stopped
    return _bounds(settings, run)


def _given_reference(
    settings: MeasurementSettings, given: Report
) -> tuple[Reference, dict[str, float]]:
    assert given.unloaded is not None
    # Times of single conversations are of use for the same conversations only.
    same = {**given.workload, "counts": None} == {**settings.selection.describe(), "counts": None}
    found = given.unloaded if same else replace(given.unloaded, served_s={})
    return found, given.unloaded_violations


async def _unloaded_run(
    settings: MeasurementSettings, on_progress: OnProgress | None, stop: asyncio.Event
) -> Run:
    salt = settings.options.cache_salt
    sample: Workload = settings.selection.workload(_UNLOADED_SEED_SHIFT if salt is None else 0)
    return await unloaded(
        settings.endpoints[0],
        (script for _, script in islice(sample, settings.unloaded)),
        replace(
            settings.options,
            duration_s=None,
            cache_salt=None if salt is None else f"unloaded-{salt}",
            id_prefix=f"{settings.options.id_prefix}unloaded-",
        ),
        on_progress=_about(
            on_progress, f"unloaded {settings.endpoints[0].system}", settings.unloaded
        ),
        stop=stop,
    )


def _bounds(settings: MeasurementSettings, run: Run) -> tuple[Reference, dict[str, float]]:
    found = reference(run.records)
    if settings.options.cache_salt is None:
        found = replace(found, served_s={})
    objectives = Objectives.from_reference(found, settings.slo_multiple)
    return found, evaluate(run.records, objectives).violations


def _described(settings: MeasurementSettings, alternation: Alternation | None) -> dict[str, Any]:
    return {
        "endpoints": [
            # Headers may hold a key; their names are enough.
            {**asdict(endpoint), "headers": sorted(endpoint.headers)}
            for endpoint in settings.endpoints
        ],
        "drive": asdict(settings.options),
        "rounds": None if alternation is None else alternation.count,
        "unloaded": settings.unloaded,
        "reference": settings.reference.environment if settings.reference else None,
        "slo_multiple": settings.slo_multiple,
        "kv_bytes_per_token": settings.kv_bytes_per_token,
    }


def _about(
    on_progress: OnProgress | None, what: str, conversations: int
) -> Callable[[Progress], None] | None:
    if on_progress is None:
        return None
    return lambda progress: on_progress(what, conversations, progress)
