"""The records of `seams.toml`: internals of other projects that are used, and not changed."""

import tomllib
from functools import cache
from pathlib import Path

from deployments.upstream.patch import Patch, of, require

_RECORDS = Path(__file__).with_name("seams.toml")


@cache
def seams() -> dict[str, Patch]:
    return {
        name: Patch(
            name=name,
            seams=tuple(seam for owner in used for seam in of(owner, used[owner])),
            **record,
        )
        for name, record in tomllib.loads(_RECORDS.read_text()).items()
        if (used := record.pop("seams"))
    }


def require_seams(*names: str) -> None:
    """Refuse another project that lacks what these records name; see `require`."""
    for name in names:
        require(seams()[name])
