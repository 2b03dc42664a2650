"""Options that several commands share, most of them for `conserve_lab.selection.Selection`."""

from pathlib import Path
from typing import Annotated

import typer

from conserve_lab.workloads import PRESETS

ProfileSource = Annotated[
    str, typer.Option(help="A profile's file, or the name of one that comes with ConServe.")
]
SloMultiple = Annotated[
    float, typer.Option(help="SLOs are this many times the unloaded latencies.")
]
# For commands that need lengths before anything runs.
KnownWorkload = Annotated[str, typer.Option(help="Kind of conversations: synthetic or recorded.")]
RecordedData = Annotated[Path | None, typer.Option(help="Recorded sessions: a folder or file.")]
SkipBad = Annotated[bool | None, typer.Option("--skip-bad", help="Leave bad lines and files out.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Counts texts' tokens: a folder, or a file.")]
Preset = Annotated[
    str | None, typer.Option(help=f"Shape of synthetic conversations: {', '.join(PRESETS)}.")
]
ArrivalPattern = Annotated[
    str, typer.Option(help="How conversations arrive: poisson, even, together, or recorded.")
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")]
ScaleTokens = Annotated[float | None, typer.Option(help="Multiply all lengths by this.")]
ScaleGaps = Annotated[float | None, typer.Option(help="Multiply the gaps between turns by this.")]
MaxGap = Annotated[float | None, typer.Option(help="Cut longer gaps down to this, in seconds.")]
MaxContextTokens = Annotated[
    int | None, typer.Option(help="The model's context. Longer turns are left out, and counted.")
]
MaxTurns = Annotated[int | None, typer.Option(help="Leave recorded sessions with more turns out.")]
