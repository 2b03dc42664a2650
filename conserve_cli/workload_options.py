"""Options that describe a workload, of those commands that several of them share.

What they mean is in `benchmarks.selection.Selection`, which is made of them. Defaults are the
commands' own. An option that one command alone has, or words in its own way, stands there.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.workloads import PRESETS

# Of commands that have to know lengths before anything runs.
KnownWorkload = Annotated[str, typer.Option(help="synthetic or recorded.")]
RecordedData = Annotated[Path | None, typer.Option(help="Folder of recorded sessions.")]
Preset = Annotated[
    str | None, typer.Option(help=f"Of synthetic conversations: {', '.join(PRESETS)}.")
]
ArrivalPattern = Annotated[str, typer.Option(help="poisson, even, or together.")]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.")]
ScaleTokens = Annotated[float | None, typer.Option(help="Factor for lengths.")]
ScaleGaps = Annotated[float | None, typer.Option(help="Factor for gaps.")]
MaxGap = Annotated[float | None, typer.Option(help="Longest gap, seconds.")]
MaxContextTokens = Annotated[
    int | None, typer.Option(help="The model's context; longer turns are left out, and counted.")
]
MaxTurns = Annotated[int | None, typer.Option(help="Leave recorded sessions with more turns out.")]
