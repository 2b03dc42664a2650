"""Write the table and the schema of settings in docs/reference, from the settings.

python scripts/settings_table.py          # rewrite both
python scripts/settings_table.py --check  # exit 1 if one is out of date
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from conserve.settings import (
    AutoscalingSettings,
    DiskSettings,
    EnvironmentSettings,
    LimitSettings,
    LMCacheSettings,
    MediaSettings,
    RoleSettings,
    Settings,
    TierSettings,
    TLSSettings,
)
from conserve.settings.expected import schema

SETTINGS = Path(__file__).resolve().parents[1] / "docs/reference/settings.md"
SCHEMA = SETTINGS.with_name("settings.schema.json")
BEGIN = "<!-- settings: begin -->\n"
END = "<!-- settings: end -->\n"
# These have a row for each of their fields.
_GROUPS = (
    LMCacheSettings,
    AutoscalingSettings,
    EnvironmentSettings,
    MediaSettings,
    TLSSettings,
)


def table() -> str:
    """All settings, as Markdown."""
    lines = ["| setting | default | what it does |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, _GROUPS):
            lines += _rows(type(default), f"{name}.", skip={"limits", "disk"})
            continue
        shown = default.replicas if isinstance(default, RoleSettings) else default
        lines.append(f"| `{name}` | {_cell(shown)} | {field.description} |")
    lines += _rows(RoleSettings, "decoders.", skip={"replicas"})
    lines += _rows(TierSettings, "tiers.NAME.")
    lines += _rows(DiskSettings, "lmcache.disk.")
    lines += _rows(LimitSettings, "environments.limits.")
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel], prefix: str, skip: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return [
        f"| `{prefix}{name}` | {_cell(field.get_default(call_default_factory=True))} "
        f"| {field.description} |"
        for name, field in model.model_fields.items()
        if name not in skip
    ]


def _cell(value: Any) -> str:
    return "" if value in (None, {}, PydanticUndefined) else f"`{value}`"


def main() -> int:
    text = SETTINGS.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = {
        SETTINGS: head + BEGIN + "\n" + table() + "\n" + END + tail,
        SCHEMA: json.dumps(schema(), indent=1) + "\n",
    }
    if "--check" in sys.argv[1:]:
        return int(any(file.read_text() != now for file, now in wanted.items()))
    for file, now in wanted.items():
        file.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
