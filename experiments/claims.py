"""Claims of papers, beside what came out here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD

from experiments.harness import Experiment

_FEW = 3


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper.

    Attributes:
        source: the paper and its section.
        published: as the paper has it.
        reached: from here on it comes out: the highest of a paper's "up to", else the lowest value
            of its range.
        ratios: one for each workload that was simulated, by its name if there are several.
    """

    source: str
    what: str
    published: str
    reached: float
    ratios: Mapping[str, float] | Sequence[float]

    @property
    def values(self) -> list[float]:
        return [*(self.ratios.values() if isinstance(self.ratios, Mapping) else self.ratios)]

    @property
    def comes_out(self) -> str:
        return f"{sum(value >= self.reached for value in self.values)} of {len(self.ratios)}"

    @property
    def simulated(self) -> str:
        """Say the range of the ratios; a few are listed."""
        if isinstance(self.ratios, Mapping) and len(self.ratios) <= _FEW:
            return ", ".join(f"{value:.2f} ({name})" for name, value in self.ratios.items())
        return f"{min(self.values):.2f} to {max(self.values):.2f}"


def show_claims(title: str, claims: Iterable[Claim], experiment: Experiment) -> None:
    """Print a table of those claims whose workloads were simulated."""
    rows = [
        (one.source, one.what, one.published, one.simulated, one.comes_out)
        for one in claims
        if one.ratios
    ]
    columns = ("source", "what", "published", "simulated", "comes out")
    experiment.show(title, columns, rows, names=5, wrap=True, box=SIMPLE_HEAD)
