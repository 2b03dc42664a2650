"""The steps of ``make test-gpu``, what each needs, and the page of their results. Plain Python.

``python -m tests.acceptance.gpu.steps`` prints the steps.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Step:
    """Some tests; they run unless a step that it needs has failed or was not run."""

    name: str
    settles: str
    needs: tuple[str, ...] = ()


_HANDOFFS = "A decoder finds all that a prefiller stored, and answers as vLLM alone does."
_ONE_OR_TWO = "The same conversations on one engine, and on two that share the GPU."
_MPS = "With an MPS daemon, engines hand over, and one outlives the other's `kill -9`."
_LMCACHE_KILLED = "With loads in flight, turns end when the server is killed: right tokens."
STEPS = (
    Step("facts", "NVML and CUDA see a GPU; tools, limits and memory of the machine."),
    Step(
        "CUDA IPC", "A process reads another's GPU memory; LMCache has its operations.", ("facts",)
    ),
    Step("doctor", "`conserve doctor` finds nothing wrong.", ("facts",)),
    Step("vLLM alone", "vLLM starts with the kernels of this machine, and answers.", ("facts",)),
    Step("one engine", "The default on one GPU starts, and keeps a conversation.", ("CUDA IPC",)),
    Step("memory of one", "Full batches take no more than `--plan` says.", ("one engine",)),
    Step("two engines", "A prefiller and a decoder start on one GPU.", ("CUDA IPC",)),
    Step(
        "memory of two",
        "Full batches of two engines take no more than `--plan` says.",
        ("two engines",),
    ),
    Step("handoffs", _HANDOFFS, ("two engines", "vLLM alone")),
    Step("costs", "Joules are NVML's; what the router adds.", ("two engines",)),
    Step("one or two", _ONE_OR_TWO, ("one engine", "two engines")),
    Step("MPS", _MPS, ("one engine", "vLLM alone")),
    Step("LMCache killed", _LMCACHE_KILLED, ("handoffs",)),
    Step("engines killed", "A killed engine is back, and so is its memory.", ("two engines",)),
    Step("lane", "The lane beside an answer: right tokens.", ("two engines", "vLLM alone")),
    Step("slots", "The driver splits SMs as the ledger does; kernels keep to theirs.", ("facts",)),
    Step("engines on slots", "Handoffs with graphs: right tokens.", ("slots", "handoffs")),
    Step(
        "lane on slots", "The lane on SMs of its own: right tokens.", ("lane", "engines on slots")
    ),
    Step("stages", "Images encoded on SMs of their own: right tokens.", ("lane on slots",)),
    Step("offload", "A tower's layers come from host memory; KV gets what they free.", ("facts",)),
    Step("pinned memory", "How long pinning takes when LMCache's server starts.", ("facts",)),
)
NAMES = tuple(step.name for step in STEPS)


class Figure(NamedTuple):
    """Something that a test measured, and does not assert."""

    name: str
    value: float | str
    unit: str = ""

    @property
    def shown(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{round(self.value, 3):,}"
        return f"{value} {self.unit}".strip()


@dataclass
class Result:
    """A step's results so far."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)  # Reasons, each once.
    broken: bool = False  # A test's set-up failed, which its other tests need as well.
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)

    @property
    def state(self) -> str:
        return "failed" if self.failed else "passed" if self.passed else "not run"

    @property
    def shown(self) -> str:
        left_out = f"not run: {'; '.join(self.left_out)}" if self.left_out else ""
        if self.state == "not run":
            return left_out or "not run: not reached, or not asked for"
        said = f"**{self.state}**{': ' if self.failed else ''}{'; '.join(self.failed)}"
        return f"{said}; {left_out}" if left_out else said


class Results(dict[str, Result]):
    """The results of all steps that were reached, by name."""

    def why_not(self, name: str) -> str:
        """Return why a step's next test is not run; empty: it is."""
        if name in self and self[name].broken:
            return "its set-up failed before"
        for need in STEPS[NAMES.index(name)].needs:
            # A step without results was not asked for.
            if need in self and (state := self[need].state) != "passed":
                return f"needs {need}, which {'failed' if state == 'failed' else 'was not run'}"
        return ""

    def page(self, title: str, about: str) -> str:
        """Return the results as a section of docs/hardware.md."""
        found = [(step, self.get(step.name, Result())) for step in STEPS]
        states = [result.state for _, result in found]
        counts = (f"{states.count(one)} {one}" for one in ("passed", "failed", "not run"))
        rows = [
            (step.name, step.settles, result.shown, f"{result.seconds:.0f}")
            for step, result in found
        ]
        figures = [(step.name, one.name, one.shown) for step, of in found for one in of.figures]
        return (
            f"### {title}\n\n{about} Steps: {', '.join(counts)}.\n\n"
            + _table(("step", "what it settles", "result", "seconds"), rows)
            + "\n"
            + _table(("step", "figure", "value"), figures)
        )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Print the steps in their order."""
    for number, step in enumerate(STEPS, start=1):
        needs = f" Needs: {', '.join(step.needs)}." if step.needs else ""
        sys.stdout.write(f"{number:2}. {step.name}: {step.settles}{needs}\n")


if __name__ == "__main__":
    main()
