"""``conserve simulate --models``: several models on one cluster's GPUs."""

from collections.abc import Callable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from autoscale.capacity.profile import load_profile
from conserve.settings import Settings, load
from conserve_lab.records import Script
from conserve_lab.report import seconds
from conserve_lab.simulate.run import EngineCounts, make_system
from conserve_lab.simulate.sharing import Model, Outcome, simulate_sharing
from conserve_lab.simulate.system import SimulationError
from conserve_lab.workloads import Workload
from hetero.gpu_division import divided


def simulate_models(
    file: Path,
    workload: Workload,
    gpus: int,
    phase_s: float,
    start_s: float,
    show: Callable[[str], None],
) -> dict[tuple[str, str], Outcome]:
    """Simulate a file's models without ``share_gpus`` and with it; outcomes by that and model.

    Each is on engines of its profile, under ``placement: elastic`` with host memory. By turns, each
    gets all conversations that come within ``phase_s``. Raises `SettingsError`, `ProfileError` or
    `SimulationError`.
    """
    # As many engines as the live system would have, where the file does not say.
    each = divided(load({"config": str(file)}), gpus, {}).each
    for name, own in each.items():
        for wrong in _cannot(own):
            where = f"models.{name}." if len(each) > 1 else ""
            raise SimulationError(f"{where}{wrong}")

    def plan(number: int) -> Iterator[tuple[float, Script]]:
        for at_s, script in workload:
            if int(at_s / phase_s) % len(each) == number:
                yield at_s, script

    found: dict[tuple[str, str], Outcome] = {}
    for shares in ("no", "yes"):
        models = {
            name: Model(
                make_system(
                    "elastic_parking",
                    load_profile(own.profile or ""),
                    EngineCounts(0, own.decoders.replicas),
                ),
                own,
                plan(number),
                start_s,
            )
            for number, (name, own) in enumerate(each.items())
        }
        outcomes = simulate_sharing(
            models, gpus, shares=shares == "yes", on_conversation=lambda: show("models")
        )
        found |= {(shares, name): outcome for name, outcome in outcomes.items()}
    return found


def _cannot(own: Settings) -> Iterator[str]:
    """Yield the settings of a model that would make its engines others than those simulated."""
    if not own.profile:
        yield "profile: engines are simulated by one; set it"
    for role, engines in own.roles:
        if role != "decoders":
            yield f"{role}: there would be {engines.replicas}; only decoders scale here, so set 0"
    if own.policy_name != "elastic":
        yield "placement: several models are simulated under elastic; leave it out"
    gpus = own.workers_of(own.decoders) * own.decoders.num_gpus
    if gpus < 1 or gpus % 1:
        yield f"decoders.num_gpus: an engine would have {gpus:g} GPUs; give it whole ones"


def show_models(found: dict[tuple[str, str], Outcome], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("share_gpus", "model"):
        table.add_column(column, no_wrap=True)
    for column in ("ended", "failed", "TTFT p50", "p95", "TTFET p50", "p95",
                   "GPU hours", "engines over time", "starts"):  # fmt: skip
        table.add_column(column, justify="right")
    for (shares, name), one in found.items():
        counts, cells = one.result.conversations, []
        for metric in ("ttft_first", "ttfet"):
            summary = one.result.latencies.get(metric)
            cells += ["", ""] if summary is None else [seconds(summary.p50), seconds(summary.p95)]
        # In the middle of each tenth of the time.
        engines = " ".join(
            str(one.engines[len(one.engines) * (2 * tenth + 1) // 20]) for tenth in range(10)
        )
        table.add_row(
            shares, name, f"{sum(counts.values()):,}", f"{counts.get('failed', 0):,}", *cells,
            f"{sum(one.engines) * one.engine_gpus / 3600:.2f}", engines, str(one.starts),
        )  # fmt: skip
    console.print(table)
