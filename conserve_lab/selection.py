"""Which workload a user asks for: command-line options to conversations."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from conserve_lab import workloads
from conserve_lab.workloads import PRESETS, Arrivals, Changes, Pattern, Workload, WorkloadError

Kind = Literal["recorded", "dialogues", "synthetic", "agents"]

# Above the special tokens of the models that have theirs first, below those of all others.
DEFAULT_VOCABULARY = "1000:4000"

_ALL: tuple[Kind, ...] = ("recorded", "dialogues", "synthetic", "agents")
# Options that not every workload has; a user who gives one where it does nothing is told.
_ONLY: dict[str, tuple[Kind, ...]] = {
    "data": ("recorded", "dialogues"),
    "preset": ("synthetic",),
    "vocabulary": ("recorded", "synthetic"),
    "scale_tokens": ("recorded", "synthetic"),
    "scale_gaps": ("recorded", "synthetic"),
    "max_gap_s": ("recorded",),
    "max_context_tokens": ("recorded", "synthetic"),
    "max_turns": ("recorded",),
    "skip_bad": ("recorded", "dialogues"),
    "tokenizer": ("recorded",),
    "mean_gap_s": ("dialogues", "agents"),
    "max_output_tokens": ("dialogues", "agents"),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """A workload, as chosen; None is an option's default.

    Attributes:
        conversations: recorded sessions' sub-agents are conversations besides.
        data: a folder or file of recorded sessions or dialogues.
        skip_bad: read what is right in it.
        tokenizer: a model's folder or tokenizer.json, for lengths of texts.
        vocabulary: token ids for prompts, ``first:last`` (the last is not used).

    Raises WorkloadError: an option does not go with the workload, or is missing.
    """

    kind: Kind
    conversations: int
    pattern: Pattern = "poisson"
    rate_per_s: float = 1.0
    seed: int = 0
    data: Path | None = None
    preset: str | None = None
    vocabulary: str | None = None
    scale_tokens: float | None = None
    scale_gaps: float | None = None
    max_gap_s: float | None = None
    max_context_tokens: int | None = None
    max_turns: int | None = None
    skip_bad: bool | None = None
    tokenizer: Path | None = None
    mean_gap_s: float | None = None
    max_output_tokens: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], **more: Any) -> "Selection":
        """Return the selection that a command's arguments give, which are named as its options."""
        named = {"kind": "workload", "pattern": "arrivals"}
        for field in fields(cls):
            option = named.get(field.name, field.name.removesuffix("_s"))
            if option in given:
                more[field.name] = given[option]
        return cls(**more)

    def __post_init__(self) -> None:
        if self.kind not in _ALL:
            raise WorkloadError(f"the workload is {self.kind!r}; choose one of {', '.join(_ALL)}")
        for name, kinds in _ONLY.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise WorkloadError(
                    f"{option(name)} is for the workload {' or '.join(kinds)}, "
                    f"not for {self.kind}; leave it out"
                )
        if self.data is None and self.kind in _ONLY["data"]:
            raise WorkloadError(f"the workload {self.kind} needs {option('data')} PATH")
        if self.data is not None and not self.data.exists():
            raise WorkloadError(f"{option('data')} {self.data}: there is no such file or folder")
        if self.preset is not None and self.preset not in PRESETS:
            raise WorkloadError(
                f"the preset is {self.preset!r}; choose one of {', '.join(PRESETS)}"
            )

    def workload(self, seed_shift: int = 0) -> Workload:
        """Make the workload; ``seed_shift`` gives other conversations of the same kind."""
        return _workload(self, seed_shift)

    def make(self, seed: int, **shape: Any) -> Workload:
        """Make the workload; ``shape`` has what differs from the preset's."""
        own = [name for name, kinds in _ONLY.items() if self.kind in kinds]
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        given["arrivals"] = Arrivals(self.pattern, self.rate_per_s, seed)
        if "vocabulary" in own:
            given["vocabulary"] = self._vocabulary()
        if self.kind == "synthetic":
            preset = replace(PRESETS[given.pop("preset", "conserve")], **shape)
            return workloads.synthetic(preset, conversations=self.conversations, seed=seed, **given)
        if self.kind == "recorded":
            names = [field.name for field in fields(Changes)]
            given["changes"] = Changes(**{n: given.pop(n) for n in names if n in given})
            data = given.pop("data")
            return workloads.recorded(data, sessions=self.conversations, seed=seed, **given)
        make = workloads.agents if self.kind == "agents" else workloads.dialogues
        return make(conversations=self.conversations, seed=seed, **given)

    def _vocabulary(self) -> range:
        text = self.vocabulary or DEFAULT_VOCABULARY
        first, _, last = text.partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise WorkloadError(
                f"the vocabulary is {text!r}; give two token ids, as in {DEFAULT_VOCABULARY}"
            )
        return range(int(first), int(last))

    def describe(self) -> dict[str, Any]:
        """Say what makes the conversations what they are, for the report; equal for equal ones."""
        about_arrivals = ("pattern", "rate_per_s")
        return {
            field.name: str(value) if isinstance(value, Path) else value
            for field in fields(self)
            if field.name not in about_arrivals and (value := getattr(self, field.name)) is not None
        }

    def describe_arrivals(self, concurrency: int | None) -> dict[str, Any]:
        rate_per_s = None if self.pattern in ("together", "recorded") else self.rate_per_s
        return {"pattern": self.pattern, "rate_per_s": rate_per_s, "concurrency": concurrency}


# Kept, because making one may mean reading many files, and it can be iterated over again.
@lru_cache(maxsize=2)
def _workload(selection: Selection, seed_shift: int) -> Workload:
    return selection.make(selection.seed + seed_shift)


def option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")
